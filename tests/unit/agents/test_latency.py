"""Percentiles come from merged sketches and are right to within one per cent."""

from __future__ import annotations

import math

import pytest
from ddsketch import DDSketch
from hypothesis import given
from hypothesis import strategies as st

from kvtop.agents.latency import NS, RELATIVE_ERROR, LatencyWindow, histogram, merge, quantile
from kvtop.agents.model import Latency, Sketch

durations = st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200)


def window_of(samples: list[float], at_ns: int = 0) -> Latency:
    window = LatencyWindow()
    window.add(at_ns, samples, [])
    frozen = window.freeze(at_ns)
    assert frozen is not None
    return frozen


def exact(samples: list[float], q: float) -> float:
    return sorted(samples)[int(q * (len(samples) - 1))]


@given(durations, durations, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_of_merged_sketches_is_that_of_all_samples(
    some: list[float], others: list[float], q: float
) -> None:
    merged = merge([window_of(some).ttft, Sketch(), window_of(others).ttft])

    value = quantile(merged, q)

    assert value == pytest.approx(exact(some + others, q), rel=0.0201)
    assert merged.count == len(some) + len(others)
    assert merged.sum_s == pytest.approx(sum(some) + sum(others))
    assert (merged.min_s, merged.max_s) == (min(some + others), max(some + others))


def test_no_samples_have_no_percentile() -> None:
    assert quantile(Sketch(), 0.5) is None
    assert quantile(merge([]), 0.99) is None


def test_a_histogram_counts_every_sample_once() -> None:
    sketch = window_of([0.0, 0.001, 0.02, 0.021, 5.0]).ttft

    assert histogram(sketch, [0.01, 0.1]) == [2, 2, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_duration_is_left_out(value: float) -> None:
    sketch = window_of([0.5, value, 0.5]).ttft

    assert sketch.count == 2
    assert quantile(sketch, 0.5) == pytest.approx(0.5, rel=0.0101)


def test_samples_leave_the_window_after_a_minute() -> None:
    window = LatencyWindow()
    assert window.freeze(0) is None
    window.add(10 * NS, [1.0], [0.1, 0.2])

    young, old = window.freeze(60 * NS), window.freeze(90 * NS)

    assert young is not None
    assert (young.ttft.count, young.itl.count) == (1, 2)
    assert old is not None
    assert (old.ttft.count, old.itl.count) == (0, 0)


def test_samples_of_nothing_but_zero_are_counted() -> None:
    window = LatencyWindow()
    window.add(NS, [0.0, 0.0], [])
    frozen = window.freeze(NS)

    assert frozen is not None
    assert (frozen.ttft.count, frozen.ttft.zero_count, frozen.ttft.counts) == (2, 2, [])
    assert quantile(frozen.ttft, 0.5) == 0
    assert merge([frozen.ttft, frozen.ttft]).count == 4


@given(durations)
def test_samples_are_counted_in_the_same_bins_as_the_library_counts_them_in(samples: list[float]) -> None:
    library = DDSketch(RELATIVE_ERROR)
    for sample in samples:
        library.add(sample)

    ours = window_of(samples).ttft

    bins = {ours.offset + position: count for position, count in enumerate(ours.counts) if count}
    store = library._store
    assert bins == {
        key: store.bins[key - store.offset]
        for key in range(store.min_key, store.max_key + 1)
        if store.bins[key - store.offset]
    }


@pytest.mark.parametrize("extremes", [[1e-300, 1e300], [5e-324, 1e9, 0.1]])
def test_no_sample_makes_a_sketch_that_is_too_large_to_send(extremes: list[float]) -> None:
    assert len(window_of(extremes).ttft.counts) < 2_000
