"""A latency histogram as lines of block characters: buckets of equal width on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvtop.agents import latency
from kvtop.agents.model import Sketch
from kvtop.console.views import format as fmt
from kvtop.console.views.table import Cell, filled, padded

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_TICKS_MS = tuple(m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5))
_LOG_GAMMA = math.log((1 + latency.RELATIVE_ERROR) / (1 - latency.RELATIVE_ERROR))
"""Logarithmic width of a sketch's bin."""
SHORTEST_S = 1e-6
"""Where the axis begins at the earliest."""
FEWEST_BARS = 12
"""Few samples get fewer and wider bars, about two by the square root of their number, but not fewer."""
AXIS_WIDTH = 6
"""Cells left of the bars, for the count axis."""


class Scope(msgspec.Struct, frozen=True):
    """What a histogram is about, for its heading."""

    title: str
    """TTFT or ITL."""
    label: str
    """The fleet, a node or an instance."""
    window_s: float | None
    why_empty: str = ""
    """What to say where there is no sample at all, beside the usual."""


def histogram(sketch: Sketch | None, scope: Scope, width: int, height: int) -> list[tuple[Cell, ...]]:
    """Return `height` lines of `width` cells: heading, percentiles, bars, axis, axis labels."""
    count = sketch.count if sketch else 0
    window = f" · last {scope.window_s:.0f} s" if scope.window_s else ""
    lines: list[tuple[Cell, ...]] = [
        (Cell(f" {scope.title}", "strong"), Cell(f" · {scope.label}{window} · n={count:,}"))
    ]
    if sketch is None or not count:
        lines.append((Cell(f" no {scope.title} sample in this window:", "muted"),))
        lines.append((Cell(f" {_no_sample(scope)}", "muted"),))
        return [filled(line, width) for line in (lines + [()] * height)[:height]]
    lines.append(_percentiles(sketch, width))
    bars = max(1, height - 4)
    columns = max(1, width - AXIS_WIDTH - 1)
    cells = max(1, columns // max(FEWEST_BARS, round(2 * math.sqrt(count))))
    columns -= columns % cells
    edges_s = _edges(sketch, columns // cells)
    lines += _bars(_columns(sketch, edges_s), bars, cells)
    lines += _axis(edges_s[0], edges_s[-1], columns)
    return [filled(line, width) for line in lines[:height]]


def side_by_side(
    left: Sequence[tuple[Cell, ...]], right: Sequence[tuple[Cell, ...]]
) -> list[tuple[Cell, ...]]:
    """Return two blocks of equally many lines as one, a cell apart."""
    return [(*a, Cell(" "), *b) for a, b in zip(left, right, strict=True)]


def _no_sample(scope: Scope) -> str:
    if scope.why_empty:
        return scope.why_empty
    return (
        "no request finished its first token" if scope.title == "TTFT" else "no request made a second token"
    )


def _percentiles(sketch: Sketch, width: int) -> tuple[Cell, ...]:
    """Return p50, p99, max and p90, as far as the line goes."""
    values = [(name, latency.quantile(sketch, q)) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))]
    values.append(("max", sketch.max_s))
    texts = [(name, fmt.duration(value)) for name, value in values]
    if sum(len(name) + len(text) + 2 for name, text in texts) > width:
        del texts[1]
    return tuple(cell for name, text in texts for cell in (Cell(f" {name} ", "muted"), Cell(text, "strong")))


def _edges(sketch: Sketch, columns: int) -> list[float]:
    """Return the columns' borders in seconds, from about p0.1 to the maximum.

    Each column holds the same whole number of the sketch's bins, so that none is higher for that alone.
    """
    low = math.log(max(latency.quantile(sketch, 0.001) or 0.0, SHORTEST_S)) / _LOG_GAMMA
    high = math.log(max(sketch.max_s or 0.0, SHORTEST_S)) / _LOG_GAMMA
    low, high = math.floor(low) - 1, math.ceil(high) + 1
    per_column = max(1, math.ceil((high - low) / columns))
    first = low - (per_column * columns - (high - low)) // 2
    return [math.exp(_LOG_GAMMA * (first + per_column * column)) for column in range(columns + 1)]


def _columns(sketch: Sketch, edges_s: Sequence[float]) -> list[float]:
    """Return each column's count; what lies outside goes to the column at that end."""
    below, *inside, above = latency.histogram(sketch, edges_s)
    inside[0] += below
    inside[-1] += above
    return inside


def _bars(heights: Sequence[float], rows: int, cells: int) -> list[tuple[Cell, ...]]:
    top = max(heights) or 1.0
    lines: list[tuple[Cell, ...]] = []
    for row in range(rows):
        floor = rows - 1 - row
        text = "".join(
            _block(height / top * rows - floor, nonzero=height > 0 and floor == 0) for height in heights
        )
        label = fmt.count(max(1, round(top))) if row == 0 else "0" if floor == 0 and rows > 1 else ""
        text = "".join(block * cells for block in text)
        lines.append((Cell(padded(label, AXIS_WIDTH - 1, right=True) + "│", "muted"), Cell(text, "accent")))
    return lines


def _block(fill: float, *, nonzero: bool) -> str:
    eighths = max(0, min(8, round(fill * 8)))
    return _EIGHTHS[max(eighths, 1) if nonzero else eighths]


def _axis(low_s: float, high_s: float, columns: int) -> list[tuple[Cell, ...]]:
    """Return the axis line with ticks at 1, 2 and 5 in each decade, and below it their labels in ms."""
    scale = columns / math.log(high_s / low_s)
    rule, labels = ["─"] * columns, [" "] * (columns + 1)
    free = 0
    unit_at = columns - 2
    for tick_ms in _ticks(low_s * 1e3, high_s * 1e3, columns):
        at = int(math.log(tick_ms / 1e3 / low_s) * scale)
        text = f"{tick_ms:g}"
        start = max(0, at - len(text) // 2)
        if at >= columns or start < free or start + len(text) > unit_at:
            continue
        rule[at] = "┴"
        labels[start : start + len(text)] = text
        free = start + len(text) + 1
    labels[unit_at + 1 :] = "ms"
    margin = " " * (AXIS_WIDTH - 1)
    return [
        (Cell(f"{margin}└{''.join(rule)}", "muted"),),
        (Cell(f"{margin} {''.join(labels)}", "muted"),),
    ]


def _ticks(low_ms: float, high_ms: float, columns: int) -> list[float]:
    """Return the ticks in range: all of 1-2-5 where there is room, else the decades."""
    ticks = [tick for tick in _TICKS_MS if low_ms <= tick <= high_ms]
    decades = [tick for tick in ticks if math.isclose(math.log10(tick) % 1, 0, abs_tol=1e-9)]
    crowded = len(ticks) * 5 > columns and len(decades) > 1
    return decades if crowded else ticks
