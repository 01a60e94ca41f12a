"""What an instance costs that has nothing to do, and one that only holds KV for a peer: processor time.

Both pairs stay up; one is stopped (SIGSTOP) while the other is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.processes import Processes
from tests.bench.connector import PATIENT, Resting
from tests.support.pair import RunningPair, start_in
from tests.support.two_steps import prefill

ROUNDS = 5
SECONDS = 6.0
SETTLED_S = 3.0
"""How long a pair that was woken is left alone before it is measured."""


def measure() -> Iterator[str]:
    """Yield medians, in percent of a core an instance, over `ROUNDS` of `SECONDS` each, by turns."""
    with Processes() as processes:
        model = make_model(processes.folder / "model")
        pairs = [
            start_in(processes, name, model, prefix=f"{name}-", settings=PATIENT)
            for name in ("kvtop-push", "stock-push")
        ]
        with Resting(pairs[0]) as ours, Resting(pairs[1]) as theirs:
            for what, before in (("idle", _nothing), ("while P holds KV that nobody fetches", _hold)):
                shares: tuple[list[float], list[float]] = ([], [])
                for number in range(ROUNDS):
                    for pair, resting, found in zip(pairs, (ours, theirs), shares, strict=True):
                        resting.wake()
                        before(pair, number)
                        found.append(_share(resting))
                kvtop, stock = (statistics.median(each) for each in shares)
                yield f"{what}, % of a core an instance: kvtop {kvtop:.1f}, stock push {stock:.1f}"


def _share(resting: Resting) -> float:
    """Return the processor time that a pair takes, in percent of one core for each of its two instances."""
    time.sleep(SETTLED_S)
    started, used_s = time.perf_counter(), resting.cpu_s()
    time.sleep(SECONDS)
    share = (resting.cpu_s() - used_s) / (time.perf_counter() - started)
    resting.rest()
    return 100 * share / 2


def _nothing(pair: RunningPair, number: int) -> None:
    del pair, number


def _hold(pair: RunningPair, number: int) -> None:
    prefill(pair.pair.prefill, make_prompt(number, random.Random(number)))
