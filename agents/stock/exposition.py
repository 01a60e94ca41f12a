"""The figures in a server's Prometheus text that kvtop looks at, and how series are put together.

A server publishes thousands of lines, of which a few dozen matter: the others are dropped before anything is
parsed, since parsing is what costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

MAX_LINES: Final = 20_000
"""Most lines of a text that are looked at; labels can multiply without end."""
_NAME: Final = re.compile(r"[a-zA-Z_:][\w:]*")
_SUFFIXES: Final = ("_bucket", "_count", "_sum", "_total")
_DUPLICATES: Final = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Ranks that do the same requests together: each of them counts the same."""


class Malformed(ValueError):
    """A text that is no Prometheus text."""


class Series(NamedTuple):
    """One value with its labels."""

    labels: Mapping[str, str]
    value: float


class Cumulative(NamedTuple):
    """A histogram as published: how many values since the start were at most each bound."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    """One for each bound, and at last of all values."""
    sum: float


class Figures:
    """The series of one text, by the name that each line has."""

    def __init__(self, text: str, wanted: Iterable[str]) -> None:
        """Read the series whose metric is `wanted` (without the suffixes of counters and histograms).

        Raises:
            Malformed: a line of a wanted metric cannot be read.
        """
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only to observe

        self._series: dict[str, list[Series]] = {}
        try:
            for family in text_string_to_metric_families("\n".join(_chosen(text, frozenset(wanted)))):
                for sample in family.samples:
                    if math.isfinite(sample.value) and sample.value >= 0:
                        self._series.setdefault(sample.name, []).append(Series(sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise Malformed(f"its metrics cannot be read: {error}") from error

    def series(self, name: str) -> list[Series]:
        """Return the series of a name. Where some are shares of one without a priority, that one alone."""
        found = self._series.get(name, [])
        totals = [each for each in found if each.labels.get("priority") == ""]
        return totals or found

    def label(self, label: str, names: Iterable[str]) -> str:
        """Return the first value of a label in any of these series."""
        return next((v for name in names for each in self.series(name) if (v := each.labels.get(label))), "")

    def total(self, name: str) -> float | None:
        """Return the sum of all series; None where there is none."""
        found = self.series(name)
        return sum(each.value for each in found) if found else None

    def count(self, name: str) -> int | None:
        """Return `total` as a whole number."""
        value = self.total(name)
        return None if value is None else round(value)

    def once(self, name: str, together: Callable[[Iterable[float]], float] = sum) -> float | None:
        """Return what the data-parallel ranks make `together`, of ranks that work together the largest."""
        groups: dict[tuple[tuple[str, str], ...], float] = {}
        for labels, value in self.series(name):
            key = tuple(sorted(item for item in labels.items() if item[0] not in _DUPLICATES))
            groups[key] = max(groups.get(key, 0.0), value)
        return together(groups.values()) if groups else None

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Return a metric's sums by the value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.series(name):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return {key: round(value) for key, value in sums.items()}

    def histogram(self, name: str) -> Cumulative | None:
        """Return a histogram, all its series put together; None where it is not whole."""
        sums: dict[float, float] = {}
        for labels, value in self.series(f"{name}_bucket"):
            try:
                bound = float(labels["le"])
            except (KeyError, ValueError):
                continue
            sums[bound] = sums.get(bound, 0.0) + value
        if math.inf not in sums:
            return None
        bounds = sorted(sums)
        counts = tuple(sums[bound] for bound in bounds)
        return Cumulative(tuple(bounds[:-1]), counts, self.total(f"{name}_sum") or 0.0)


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    every = list(values)
    return sum(every) / len(every)


def _chosen(text: str, wanted: frozenset[str]) -> Iterable[str]:
    """Yield the lines that say something of a wanted metric."""
    for number, line in enumerate(text.split("\n")):
        if number >= MAX_LINES:
            raise ValueError(f"it has more than {MAX_LINES} lines")
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) == 4 and parts[1] == "TYPE" and _metric(parts[2]) in wanted:
                yield line
        elif (name := _NAME.match(line)) and (name[0] in wanted or _metric(name[0]) in wanted):
            yield line


def _metric(name: str) -> str:
    """Return a name without its suffix.

    >>> _metric("a_bucket"), _metric("a")
    ('a', 'a')
    """
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
