"""TTFT and ITL as mergeable sketches over a sliding window.

Percentiles of a fleet come from merged sketches, never from averaged percentiles. The sketch is DDSketch
(relative error 1 %), by Datadog's library; this module alone knows its insides, to put it on the wire.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from kvtop.agents.model import Latency, Sketch

if TYPE_CHECKING:
    from ddsketch import DDSketch

RELATIVE_ERROR: Final = 0.01
WINDOW_S: Final = 60.0
SLICE_S: Final = 5.0
"""The window slides in steps of this length."""
NS: Final = 1_000_000_000


def _empty() -> DDSketch:
    from ddsketch import DDSketch  # noqa: PLC0415 - the console's first frame has no samples yet

    return DDSketch(RELATIVE_ERROR)


def freeze(sketch: DDSketch) -> Sketch:
    """Return a DDSketch of durations in seconds as a value for the wire."""
    if sketch.count == 0:
        return Sketch()
    store = sketch._store
    keys = range(store.min_key, store.max_key + 1) if store.count else ()  # zeros are counted elsewhere
    counts = [store.bins[key - store.offset] for key in keys]
    return Sketch(
        count=int(sketch.count),
        sum_s=sketch.sum,
        min_s=sketch._min,
        max_s=sketch._max,
        zero_count=int(sketch._zero_count),
        offset=store.min_key if counts else 0,
        counts=counts,
    )


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
    total = _empty()
    parts = [part for part in sketches if part.count]
    for part in parts:
        total.merge(thaw(part))
    if not parts:
        return Sketch()
    merged = freeze(total)
    return Sketch(
        count=sum(part.count for part in parts),
        sum_s=sum(part.sum_s for part in parts),
        min_s=min(part.min_s for part in parts if part.min_s is not None),
        max_s=max(part.max_s for part in parts if part.max_s is not None),
        zero_count=merged.zero_count,
        offset=merged.offset,
        counts=merged.counts,
    )


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


class _Slice:
    __slots__ = ("began_ns", "itl", "ttft")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.ttft = _empty()
        self.itl = _empty()


class LatencyWindow:
    """The samples of one instance over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        """Begin empty."""
        self._slices: deque[_Slice] = deque()
        self._frozen: Latency | None = None

    def add(self, at_ns: int, ttft_s: Iterable[float], itl_s: Iterable[float]) -> None:
        """Take samples in seconds that were reported at `at_ns` (CLOCK_MONOTONIC).

        What is no duration (negative, infinite, not a number) is left out.
        """
        began_ns = at_ns - at_ns % int(SLICE_S * NS)
        if not self._slices or self._slices[-1].began_ns < began_ns:
            self._slices.append(_Slice(began_ns))
        newest = self._slices[-1]
        for sketch, values in ((newest.ttft, ttft_s), (newest.itl, itl_s)):
            for value in values:
                if 0 <= value < math.inf:
                    sketch.add(value)
        self._frozen = None

    def freeze(self, now_ns: int) -> Latency | None:
        """Return the window that ends now; None while no sample was ever seen."""
        while self._slices and self._slices[0].began_ns + int(SLICE_S * NS) < now_ns - int(WINDOW_S * NS):
            self._slices.popleft()
            self._frozen = Latency(WINDOW_S, Sketch(), Sketch()) if not self._slices else None
        if self._frozen is None and self._slices:
            ttft, itl = _empty(), _empty()
            for part in self._slices:
                ttft.merge(part.ttft)
                itl.merge(part.itl)
            self._frozen = Latency(WINDOW_S, freeze(ttft), freeze(itl))
        return self._frozen
