"""Compares two things by turns, so that what else the machine does falls on both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How many times as long `ours` took as `theirs`, or as much it has, over all pairs."""

    what: str
    pairs: int
    ours: float
    """The median of ours."""
    theirs: float
    """The median of theirs."""
    median: float
    """The median of the ratios of each pair."""
    low: float
    """The first quartile of these ratios."""
    high: float
    """The third quartile of these ratios."""
    unit: str = "ms"
    """What both medians are in."""

    def __str__(self) -> str:
        """Return one line for a person."""
        digits = 1 if min(self.ours, self.theirs) >= 10 else 2
        ours, theirs = (f"{each:.{digits}f} {self.unit}" for each in (self.ours, self.theirs))
        return (
            f"{self.what}: {self.median:.2f} (quartiles {self.low:.2f} to {self.high:.2f}, "
            f"{self.pairs} pairs, medians {ours} and {theirs})"
        )


def ratio(what: str, ours: Callable[[], object], theirs: Callable[[], object], *, pairs: int = 50) -> Ratio:
    """Time `pairs` pairs, swapping who goes first, after one round of both that does not count."""
    _seconds(ours), _seconds(theirs)
    return quartiles(what, list(_pairs(ours, theirs, pairs)))


def quartiles(
    what: str, figures: Sequence[tuple[float, float]], *, unit: str = "ms", scale: float = 1e3
) -> Ratio:
    """Return what pairs of figures say of ours and theirs.

    Args:
        what: what is compared.
        figures: ours and theirs; by default times in seconds.
        unit: what the medians are shown in.
        scale: what a figure is multiplied with to be in this unit.
    """
    low, median, high = statistics.quantiles((a / b for a, b in figures), n=4, method="inclusive")
    ours, theirs = (statistics.median(column) * scale for column in zip(*figures, strict=True))
    return Ratio(what, len(figures), ours, theirs, median, low, high, unit)


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
