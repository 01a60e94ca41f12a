"""Compares two things by turns, so that what else the machine does falls on both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How many times as long `ours` took as `theirs`, over all pairs."""

    what: str
    pairs: int
    ours_ms: float
    """The median of ours, in milliseconds."""
    theirs_ms: float
    """The median of theirs, in milliseconds."""
    median: float
    """The median of the ratios of each pair."""
    low: float
    """The first quartile of these ratios."""
    high: float
    """The third quartile of these ratios."""

    def __str__(self) -> str:
        """Return one line for a person."""
        return (
            f"{self.what}: {self.median:.2f} (quartiles {self.low:.2f} to {self.high:.2f}, "
            f"{self.pairs} pairs, medians {self.ours_ms:.1f} ms and {self.theirs_ms:.1f} ms)"
        )


def ratio(what: str, ours: Callable[[], object], theirs: Callable[[], object], *, pairs: int = 50) -> Ratio:
    """Time `pairs` pairs, swapping who goes first, after one round of both that does not count."""
    _seconds(ours), _seconds(theirs)
    return quartiles(what, list(_pairs(ours, theirs, pairs)))


def quartiles(what: str, times: Sequence[tuple[float, float]]) -> Ratio:
    """Return what pairs of times, in seconds, say of ours and theirs."""
    low, median, high = statistics.quantiles((a / b for a, b in times), n=4, method="inclusive")
    ours_ms, theirs_ms = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return Ratio(what, len(times), ours_ms, theirs_ms, median, low, high)


def _pairs(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int
) -> Iterator[tuple[float, float]]:
    for number in range(pairs):
        if number % 2:
            second = _seconds(theirs)
            yield _seconds(ours), second
        else:
            yield _seconds(ours), _seconds(theirs)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
