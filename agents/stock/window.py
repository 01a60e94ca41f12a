"""A server's cumulative histograms, as what was added to them within a sliding window."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

from kvtop.agents.facts import Buckets
from kvtop.agents.latency import NS, WINDOW_S
from kvtop.agents.stock.exposition import Cumulative

KEPT: Final = 128
"""Most readings that are kept: a window of readings twice a second."""


class HistogramWindow:
    """The readings of one histogram over the last `WINDOW_S`."""

    def __init__(self) -> None:
        """Begin empty."""
        self._readings: deque[tuple[int, Cumulative]] = deque(maxlen=KEPT)

    def add(self, at_ns: int, reading: Cumulative | None) -> None:
        """Take a reading; that of a server which was started anew does not go on from the last one."""
        if reading is None:
            self._readings.clear()
            return
        if self._readings and not _continues(self._readings[-1][1], reading):
            self._readings.clear()
        self._readings.append((at_ns, reading))
        while len(self._readings) > 1 and self._readings[1][0] <= at_ns - int(WINDOW_S * NS):
            self._readings.popleft()

    def buckets(self) -> Buckets | None:
        """Return what was added within the window; None until there are two readings to compare."""
        if len(self._readings) < 2:
            return None
        (_, before), (_, after) = self._readings[0], self._readings[-1]
        added = [new - old for old, new in zip(before.counts, after.counts, strict=True)]
        return Buckets(
            bounds_s=list(after.bounds),
            counts=[max(0.0, above - below) for below, above in pairwise([0.0, *added])],
            count=round(added[-1]),
            sum_s=max(0.0, after.sum - before.sum),
        )


def _continues(before: Cumulative, after: Cumulative) -> bool:
    return before.bounds == after.bounds and all(
        old <= new for old, new in zip(before.counts, after.counts, strict=True)
    )


def quantile_bound(of: Buckets | None, q: float) -> float | None:
    """Return the bound that the `q` quantile is at most, in seconds; infinite above the last bound.

    >>> quantile_bound(Buckets([0.1, 0.5], [5, 4, 1], 10, 2.0), 0.9)
    0.5
    >>> quantile_bound(Buckets([0.1], [0, 1], 1, 2.0), 0.5), quantile_bound(Buckets([0.1], [0, 0]), 0.5)
    (inf, None)
    """
    if of is None or of.count <= 0:
        return None
    passed = 0.0
    for bound, count in zip([*of.bounds_s, float("inf")], of.counts, strict=True):
        passed += count
        if passed >= q * of.count:
            return bound
    return float("inf")
