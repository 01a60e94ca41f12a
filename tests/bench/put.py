"""What a state change costs the engine's thread: one `Reporter.put`, idle and with a real agent."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from kvtop.agents.events import TransferEvent
from kvtop.agents.reporter import Reporter
from tests.bench.paired import Ratio, ratio
from tests.support.agent import hello, reporting, running_agent, runtime_folder

PUTS = 10_000
ROUNDS = 20
PAIRS = 50
EVENT = TransferEvent(at_ns=1, side="prefill", request_id="r", step="queued")


def measure() -> Iterator[str | Ratio]:
    """Yield what `put` costs against `deque.append`, and the time of one call, clock readings included.

    That time is the median over rounds, and the slowest of 1,000 in the median round.
    """
    with runtime_folder() as paths:
        kept = Reporter(hello(), paths, capacity=PUTS * (PAIRS + 1), start_agent=False)
        ring: deque[TransferEvent] = deque()
        yield ratio(
            f"{PUTS} put() / {PUTS} deque.append()",
            partial(_repeat, kept.put),
            partial(_repeat, ring.append),
            pairs=PAIRS,
        )
        assert kept.dropped_events == 0, "a dropped event costs less than one that is kept"
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


def _repeat(append: Callable[[TransferEvent], None]) -> None:
    for _ in range(PUTS):
        append(EVENT)


def _round(reporter: Reporter) -> list[int]:
    times = []
    for _ in range(PUTS):
        began_ns = time.perf_counter_ns()
        reporter.put(EVENT)
        times.append(time.perf_counter_ns() - began_ns)
    return times
