"""TTFT and ITL as mergeable sketches over a sliding window.

Percentiles of a fleet come from merged sketches, never from averaged percentiles. The sketch is DDSketch
(relative error 1 %), by Datadog's library; this module alone knows its insides, to count and to send samples.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import ceil, log, log1p
from typing import TYPE_CHECKING, Final

from kvtop.agents.model import Latency, Sketch

if TYPE_CHECKING:
    from ddsketch import DDSketch

RELATIVE_ERROR: Final = 0.01
WINDOW_S: Final = 60.0
SLICE_S: Final = 5.0
"""The window slides in steps of this length."""
NS: Final = 1_000_000_000
SHORTEST_S: Final = 1e-9
"""What is shorter counts as 0."""
LONGEST_S: Final = 1e6
_BINS_PER_E: Final = 1 / log1p(2 * RELATIVE_ERROR / (1 - RELATIVE_ERROR))
"""How many bins of a DDSketch a factor of e spans: the bounds of each are as (1 + error) to (1 - error)."""


def _empty() -> DDSketch:
    from ddsketch import DDSketch  # noqa: PLC0415 - the console's first frame has no samples yet

    return DDSketch(RELATIVE_ERROR)


def thaw(sketch: Sketch) -> DDSketch:
    """Return the DDSketch that a wire value stands for (its sum and extremes to within the error)."""
    thawed = _empty()
    if sketch.zero_count:
        thawed.add(0.0, float(sketch.zero_count))
    for position, count in enumerate(sketch.counts):
        if count > 0:
            thawed.add(thawed._mapping.value(sketch.offset + position), count)
    return thawed


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """Return one sketch of all the samples; it has the same relative error."""
    parts = [part for part in sketches if part.count]
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(
            {part.offset + position: count for position, count in enumerate(part.counts) if count > 0}
        )
    if not parts:
        return Sketch()
    offset, dense = _dense(counts)
    return Sketch(
        count=sum(part.count for part in parts),
        sum_s=sum(part.sum_s for part in parts),
        min_s=min((part.min_s for part in parts if part.min_s is not None), default=None),
        max_s=max((part.max_s for part in parts if part.max_s is not None), default=None),
        zero_count=sum(part.zero_count for part in parts),
        offset=offset,
        counts=dense,
    )


def _dense(counts: Counter[int]) -> tuple[int, list[float]]:
    """Return the lowest bin, and the counts from it to the highest one."""
    keys = range(min(counts), max(counts) + 1) if counts else range(0)
    return keys.start, [counts[key] for key in keys]


def quantile(sketch: Sketch, q: float) -> float | None:
    """Return the `q` quantile (0 to 1) in seconds, None where there are no samples."""
    if not sketch.count:
        return None
    value = thaw(sketch).get_quantile_value(q)
    return None if value is None else float(value)


def histogram(sketch: Sketch, edges_s: Sequence[float]) -> list[float]:
    """Return how many samples lie in each interval (edges[i], edges[i+1]], and outside at the ends.

    The result has `len(edges_s) + 1` counts: the first is of samples up to the first edge, the last of those
    above the last edge. A bin is counted where its middle lies.
    """
    counts = [0.0] * (len(edges_s) + 1)
    counts[0] += sketch.zero_count
    mapping = _empty()._mapping
    for position, count in enumerate(sketch.counts):
        if count > 0:
            value = mapping.value(sketch.offset + position)
            counts[sum(value > edge for edge in edges_s)] += count
    return counts


class _Bins:
    """Samples counted by the bins of a DDSketch, which its library does one by one and more slowly."""

    __slots__ = ("counts", "least_s", "most_s", "sum_s", "zeros")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.zeros = 0
        self.sum_s = 0.0
        self.least_s = math.inf
        self.most_s = 0.0

    def add(self, values_s: Iterable[float]) -> None:
        """Count samples; what is no duration (negative, not a number, endless) is left out."""
        values = [value for value in values_s if 0 <= value <= LONGEST_S]
        if not values:
            return
        self.sum_s += sum(values)
        self.least_s = min(self.least_s, *values)
        self.most_s = max(self.most_s, *values)
        if self.least_s < SHORTEST_S:
            some = [value for value in values if value >= SHORTEST_S]
            self.zeros += len(values) - len(some)
            values = some
        self.counts.update([ceil(log(value) * _BINS_PER_E) for value in values])

    def merge(self, other: _Bins) -> None:
        """Count the samples of another too."""
        self.counts.update(other.counts)
        self.zeros += other.zeros
        self.sum_s += other.sum_s
        self.least_s = min(self.least_s, other.least_s)
        self.most_s = max(self.most_s, other.most_s)

    def freeze(self) -> Sketch:
        """Return a value for the wire."""
        count = self.zeros + self.counts.total()
        if not count:
            return Sketch()
        offset, dense = _dense(self.counts)
        return Sketch(
            count=count,
            sum_s=self.sum_s,
            min_s=self.least_s,
            max_s=self.most_s,
            zero_count=self.zeros,
            offset=offset,
            counts=dense,
        )


class _Slice:
    __slots__ = ("began_ns", "itl", "ttft")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.ttft = _Bins()
        self.itl = _Bins()


class LatencyWindow:
    """The samples of one instance over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        """Begin empty."""
        self._slices: deque[_Slice] = deque()
        self._frozen: Latency | None = None

    def add(self, at_ns: int, ttft_s: Iterable[float], itl_s: Iterable[float]) -> None:
        """Take samples in seconds that were reported at `at_ns` (CLOCK_MONOTONIC).

        What is no duration (negative, longer than `LONGEST_S`, not a number) is left out.
        """
        began_ns = at_ns - at_ns % int(SLICE_S * NS)
        if not self._slices or self._slices[-1].began_ns < began_ns:
            self._slices.append(_Slice(began_ns))
        newest = self._slices[-1]
        newest.ttft.add(ttft_s)
        newest.itl.add(itl_s)
        self._frozen = None

    def freeze(self, now_ns: int) -> Latency | None:
        """Return the window that ends now; None while no sample was ever seen."""
        oldest_ns = now_ns - int((WINDOW_S + SLICE_S) * NS)
        while self._slices and self._slices[0].began_ns < oldest_ns:
            self._slices.popleft()
            self._frozen = Latency(WINDOW_S, Sketch(), Sketch()) if not self._slices else None
        if self._frozen is None and self._slices:
            ttft, itl = _Bins(), _Bins()
            for part in self._slices:
                ttft.merge(part.ttft)
                itl.merge(part.itl)
            self._frozen = Latency(WINDOW_S, ttft.freeze(), itl.freeze())
        return self._frozen
