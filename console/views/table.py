"""What a table is, apart from what draws it: columns, cells, which columns fit, and the order of rows.

The same columns serve the live grid and the plain tables of `kvtop status` and `kvtop transfers`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from kvtop.console.clock import Moment

Tone = Literal["", "muted", "strong", "good", "warn", "bad", "accent", "push", "pull", "sim", "badge"]
"""What a text means; themes say how that looks. Never the only carrier of a state."""

RowT = TypeVar("RowT")
SortKey = float | str | None


class Cell(NamedTuple):
    """A text with its meaning."""

    text: str
    tone: Tone = ""


class Column(msgspec.Struct, Generic[RowT], frozen=True):
    """One column of a table of `RowT`."""

    id: str
    title: str
    width: int
    """Cells that it needs."""
    cell: Callable[[RowT, Moment], Cell]
    help: str
    """What the figure is, with its scope, unit and window."""
    sort_key: Callable[[RowT, Moment], SortKey] | None = None
    """None: not sortable. Rows whose key is None are unknown and come last in either direction."""
    descending: bool = True
    """The direction that an operator wants first: the most, the oldest, the slowest."""
    right: bool = True
    drop: int = 0
    """0: always shown. Else the higher, the earlier it goes when the line is too short."""
    flex: int = 0
    """Share of the spare width that it may take."""
    most: int = 1000
    """Width from which on more would not help."""


class Table(msgspec.Struct, Generic[RowT], frozen=True):
    """How rows of one kind become lines."""

    columns: tuple[Column[RowT], ...]
    key: Callable[[RowT], Hashable]
    """The row's identity, the same from update to update."""
    span: Callable[[RowT, Moment], tuple[Cell, ...] | None] = lambda _row, _now: None
    """For rows that are one running text instead of columns: that text."""


class Sort(msgspec.Struct, frozen=True):
    """By which column a table is ordered."""

    column: str
    descending: bool


WIDEST_NAME = 32
"""Width that a name may claim before other columns."""
GAP = 1
"""Cells between two columns."""


def fit(columns: Sequence[Column[RowT]], width: int) -> tuple[Column[RowT], ...]:
    """Return the columns that `width` has room for, with spare width given to the flexible ones.

    Columns go by their `drop`, the highest first; those with the same `drop` go together.
    """
    kept = list(columns)
    while _needed(kept) > width and (worst := max(column.drop for column in kept)):
        kept = [column for column in kept if column.drop != worst]
    return _stretched(kept, width - _needed(kept))


def _needed(columns: Sequence[Column[RowT]]) -> int:
    return sum(column.width for column in columns) + GAP * max(0, len(columns) - 1)


def _stretched(columns: Sequence[Column[RowT]], spare: int) -> tuple[Column[RowT], ...]:
    shares = sum(column.flex for column in columns)
    if spare <= 0 or not shares:
        return tuple(columns)
    stretched = []
    for column in columns:
        extra = spare * column.flex // shares if column.flex else 0
        extra = min(extra, max(0, column.most - column.width))
        spare, shares = spare - extra, shares - column.flex
        stretched.append(replace(column, width=column.width + extra) if extra else column)
    return tuple(stretched)


def for_fleet(
    columns: Sequence[Column[RowT]], named: str, names: Iterable[str], *, simulated: bool
) -> tuple[Column[RowT], ...]:
    """Return the columns for one fleet: `named` as wide as its longest name, up to `WIDEST_NAME`.

    The column `sim` is left out where nothing is simulated.
    """
    longest = max(map(cell_len, names), default=0)
    return tuple(
        replace(column, width=max(column.width, min(longest, WIDEST_NAME))) if column.id == named else column
        for column in columns
        if simulated or column.id != "sim"
    )


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` in exactly `width` cells; what is too long ends in `…`.

    >>> padded("ab", 4, right=True), padded("abcdef", 4)
    ('  ab', 'abc…')
    """
    length = len(text) if text.isascii() else cell_len(text)
    if length == width:
        return text
    if length > width:
        return (
            set_cell_size(set_cell_size(text, max(0, width - 1)).rstrip() + "…", width) if width > 0 else ""
        )
    return " " * (width - length) + text if right else text + " " * (width - length)


def line(
    table: Table[RowT], columns: Sequence[Column[RowT]], row: RowT, now: Moment, width: int
) -> tuple[Cell, ...]:
    """Return one row as cells whose texts fill `width` exactly."""
    if (span := table.span(row, now)) is not None:
        return filled(span, width)
    cells = []
    for column in columns:
        cell = column.cell(row, now)
        cells.append(Cell(padded(cell.text, column.width, right=column.right), cell.tone))
        cells.append(Cell(" " * GAP))
    return filled(cells[:-1], width)


def filled(cells: Sequence[Cell], width: int) -> tuple[Cell, ...]:
    """Cut or extend a run of cells to exactly `width`."""
    result = []
    for text, tone in cells:
        if width <= 0:
            break
        length = cell_len(text)
        result.append(Cell(text if length <= width else padded(text, width), tone))
        width -= length
    if width > 0:
        result.append(Cell(" " * width))
    return tuple(result)


def heading(columns: Sequence[Column[RowT]], sort: Sort | None, width: int) -> tuple[Cell, ...]:
    """Return the titles, with the sort's direction at its column."""
    cells = []
    for column in columns:
        cell = Cell(column.title, "muted")
        if sort and column.id == sort.column:
            arrow = "▼" if sort.descending else "▲"
            cell = Cell(padded(column.title, min(len(column.title), column.width - 1)) + arrow, "accent")
        cells += [Cell(padded(cell.text, column.width, right=column.right), cell.tone), Cell(" " * GAP)]
    return filled(cells[:-1], width)


def column_at(columns: Sequence[Column[RowT]], x: int) -> Column[RowT] | None:
    """Return the column that cell `x` of a line belongs to."""
    for column in columns:
        if x < column.width:
            return column
        x -= column.width + GAP
    return None


def next_sort(sort: Sort | None, columns: Sequence[Column[RowT]]) -> Sort | None:
    """Return the sort by the next sortable column after the present one."""
    sortable = [column for column in columns if column.sort_key]
    if not sortable:
        return sort
    ids = [column.id for column in sortable]
    present = ids.index(sort.column) if sort and sort.column in ids else -1
    chosen = sortable[(present + 1) % len(sortable)]
    return Sort(chosen.id, chosen.descending)


def sort_by(sort: Sort | None, column: Column[RowT]) -> Sort | None:
    """Return the sort after a click on a column's title: that column, or its other direction."""
    if not column.sort_key:
        return sort
    if sort and sort.column == column.id:
        return replace(sort, descending=not sort.descending)
    return Sort(column.id, column.descending)


def ordered(
    rows: Sequence[RowT], sort: Sort | None, columns: Sequence[Column[RowT]], now: Moment
) -> list[RowT]:
    """Return `rows` in the order of `sort`; equal rows keep their order, unknown ones come last."""
    key = next((column.sort_key for column in columns if sort and column.id == sort.column), None)
    if sort is None or key is None:
        return list(rows)
    keys = [key(row, now) for row in rows]
    known: Sequence[int] = range(len(keys))
    unknown: Sequence[RowT] = ()
    if None in keys:
        known = [index for index, value in enumerate(keys) if value is not None]
        unknown = [row for row, value in zip(rows, keys, strict=True) if value is None]
    order = sorted(known, key=keys.__getitem__, reverse=sort.descending)  # type: ignore[arg-type]
    return [*map(rows.__getitem__, order), *unknown]


def plain_lines(table: Table[RowT], rows: Sequence[RowT], now: Moment) -> list[str]:
    """Return the whole table as plain text, each column as wide as its widest cell."""
    columns = table.columns
    spans = [table.span(row, now) for row in rows]
    cells = [
        [] if span is not None else [column.cell(row, now).text for column in columns]
        for row, span in zip(rows, spans, strict=True)
    ]
    body = [texts for texts in [[column.title for column in columns], *cells] if texts]
    widths = [max(cell_len(texts[index]) for texts in body) for index in range(len(columns))]

    def aligned(texts: Sequence[str]) -> str:
        parts = zip(texts, widths, columns, strict=True)
        return "  ".join(padded(text, width, right=column.right) for text, width, column in parts).rstrip()

    lines = [aligned([column.title for column in columns])]
    for span, texts in zip(spans, cells, strict=True):
        lines.append(aligned(texts) if span is None else "".join(cell.text for cell in span).rstrip())
    return lines
