"""How long a switch and a drain take on a pair under load, proved and not only ordered."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator

from kvtop.agents.act import Command
from tests.bench.connector import prompts
from tests.chaos.storm import act
from tests.support.pair import Load, RunningPair, running_pair
from tests.support.waiting import wait_until

TIMES = 10
IN_FLIGHT = 4
REQUESTS = 2_000
"""More than are answered while this measures; the rest are cancelled."""


def measure() -> Iterator[str]:
    """Yield the medians in milliseconds, over `TIMES` switches each way and `TIMES` drains."""
    with running_pair("kvtop-push") as pair:
        load = list(itertools.islice(prompts(), REQUESTS))
        with Load(pair.url, load, in_flight=IN_FLIGHT) as running:
            wait_until(lambda: running.finished >= 2 * IN_FLIGHT, "the load", timeout_s=60)
            switches = [_switch(pair, mode) for _ in range(TIMES) for mode in ("pull", "push")]
            yield _line("a switch, until transfers prove it", switches)
            drains = [_drain(pair) for _ in range(TIMES)]
            yield _line("a drain of D, until no transfer keeps it", drains)


def _switch(pair: RunningPair, mode: str) -> float:
    return _seconds(pair, Command(verb="mode", targets=["prefill-0"], arguments={"mode": mode}, wait=True))


def _drain(pair: RunningPair) -> float:
    took_s = _seconds(pair, Command(verb="drain", targets=["decode-0"], wait=True, force=True))
    _seconds(pair, Command(verb="undrain", targets=["decode-0"]))
    return took_s


def _seconds(pair: RunningPair, command: Command) -> float:
    started = time.perf_counter()
    outcome = asyncio.run(act(pair, command))
    assert outcome.state == "done", outcome.message
    return time.perf_counter() - started


def _line(what: str, seconds: list[float]) -> str:
    return (
        f"{what}: median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds) * 1e3:.0f} ms "
        f"({len(seconds)} times, {IN_FLIGHT} requests in flight)"
    )
