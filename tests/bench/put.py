"""What a state change costs the engine's thread: one `Reporter.put`, idle and with a real agent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from kvtop.agents.events import TransferEvent
from kvtop.agents.reporter import Reporter
from tests.support.agent import hello, reporting, running_agent, runtime_folder

PUTS = 10_000
ROUNDS = 20


def measure() -> Iterator[str]:
    """Yield the time of one `put`: the median over rounds, and the slowest of 1,000 in the median round."""
    with runtime_folder() as paths:
        yield _figure("no agent", Reporter(hello(), paths, capacity=2 * PUTS * ROUNDS, start_agent=False))
        with (
            running_agent(paths),
            reporting(paths, capacity=2 * PUTS * ROUNDS, start_agent=False) as reporter,
        ):
            yield _figure("agent attached", reporter)


def _figure(what: str, reporter: Reporter) -> str:
    rounds = [sorted(_round(reporter)) for _ in range(ROUNDS)]
    median = statistics.median(times[PUTS // 2] for times in rounds)
    slow = statistics.median(times[-PUTS // 1000] for times in rounds)
    assert reporter.dropped_events == 0, "a dropped event costs less than one that is kept"
    return (
        f"put(), {what}: median {median:.0f} ns, 99.9 % within {slow / 1e3:.1f} µs ({ROUNDS} x {PUTS} puts)"
    )


def _round(reporter: Reporter) -> list[int]:
    event = TransferEvent(at_ns=1, side="prefill", request_id="r", step="queued")
    times = []
    for _ in range(PUTS):
        began_ns = time.perf_counter_ns()
        reporter.put(event)
        times.append(time.perf_counter_ns() - began_ns)
    return times
