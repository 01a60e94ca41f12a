"""The live table: a Line API grid that draws the visible rows and redraws those that changed.

Rows come in order from a pure view. The cursor belongs to a row, not to a place: when rows are sorted anew
or others come and go, it stays on its row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic

from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kvtop.console.actions import bindings
from kvtop.console.clock import Moment
from kvtop.console.views.table import Cell, Column, RowT, Sort, Table, column_at, filled, fit, heading, line
from kvtop.console.widgets.tones import Toned

HEADER_LINES = 1


class Grid(Toned, ScrollView, Generic[RowT], can_focus=True, inherit_bindings=False):
    """A table of `RowT` that is shown anew at each tick."""

    BINDINGS = bindings("grid")
    DEFAULT_CSS = "Grid { overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }"

    class Opened(Message):
        """Enter or a double click on a row."""

        def __init__(self, key: Hashable) -> None:
            super().__init__()
            self.key = key

    class CursorMoved(Message):
        """The operator put the cursor on another row, or took it away (None)."""

        def __init__(self, key: Hashable | None) -> None:
            super().__init__()
            self.key = key

    class TitleClicked(Message):
        """A click on a column's title."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self, table: Table[RowT], *, id: str | None = None) -> None:  # noqa: A002 - textual's name
        super().__init__(id=id)
        self._table = table
        self._rows: Sequence[RowT] = ()
        self._now = Moment(0.0, 0.0)
        self._sort: Sort | None = None
        self._columns: tuple[Column[RowT], ...] = ()
        self._empty: tuple[tuple[Cell, ...], ...] = ()
        self._cursor: Hashable | None = None
        self._cursor_index = 0
        self._drawn: dict[int, tuple[tuple[Cell, ...], bool]] = {}

    # What it shows

    def show(
        self,
        table: Table[RowT],
        rows: Sequence[RowT],
        now: Moment,
        sort: Sort | None = None,
        empty: Sequence[tuple[Cell, ...]] = (),
    ) -> None:
        """Show `rows`, which are in the order of `sort` already; `empty` is shown where there are none."""
        if table.columns != self._table.columns or not self._columns:
            self._table = table
            self._refit()
        self._rows, self._now, self._sort, self._empty = rows, now, sort, tuple(empty)
        self._settle_cursor()
        self.virtual_size = Size(0, len(rows) + HEADER_LINES)
        self._redraw_changed()

    def advance(self, now: Moment) -> None:
        """Show the same rows at a later moment: ages grow."""
        self._now = now
        self._redraw_changed()

    @property
    def columns(self) -> tuple[Column[RowT], ...]:
        """The columns that fit."""
        return self._columns

    @property
    def cursor(self) -> Hashable | None:
        """The key of the row that the operator chose, None while none is chosen."""
        return self._cursor

    @property
    def cursor_line(self) -> int | None:
        """Where on the widget the cursor is drawn, None where it is not."""
        y = self._cursor_index - self.scroll_offset.y + HEADER_LINES
        return y if self._cursor is not None and HEADER_LINES <= y < self.size.height else None

    def text_at(self, y: int) -> str:
        """Return line `y` of the widget as plain text."""
        return "".join(cell.text for cell in self._line(y)[0])

    # The cursor

    def action_move(self, rows: int) -> None:
        """Move the cursor by `rows`; the first move puts it on the first visible row."""
        if self._cursor is None:
            self._put_cursor(self.scroll_offset.y if rows > 0 else self._cursor_index)
        else:
            self._put_cursor(self._cursor_index + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by visible pages."""
        self._put_cursor(self._cursor_index + pages * max(1, self.size.height - HEADER_LINES - 1))

    def action_home(self) -> None:
        """Put the cursor on the first row."""
        self._put_cursor(0)

    def action_end(self) -> None:
        """Put the cursor on the last row."""
        self._put_cursor(len(self._rows) - 1)

    def action_open(self) -> None:
        """Open the chosen row, the first one where none is chosen."""
        if self._rows:
            index = self._cursor_index if self._cursor is not None else 0
            self.post_message(self.Opened(self._table.key(self._rows[index])))

    def clear_cursor(self) -> bool:
        """Take the cursor away; return whether there was one."""
        had = self._cursor is not None
        self._cursor, self._cursor_index = None, 0
        if had:
            self._redraw_changed()
            self.post_message(self.CursorMoved(None))
        return had

    def _put_cursor(self, index: int) -> None:
        if not self._rows:
            return
        self._cursor_index = max(0, min(index, len(self._rows) - 1))
        key = self._table.key(self._rows[self._cursor_index])
        if key != self._cursor:
            self._cursor = key
            self.post_message(self.CursorMoved(key))
        self._scroll_to_cursor()
        self._redraw_changed()

    def _settle_cursor(self) -> None:
        """Find the cursor's row among the new ones; where it is gone, its neighbour takes over."""
        if self._cursor is None:
            return
        if not self._rows:
            self.clear_cursor()
            return
        found = self._find(self._cursor)
        if found is None:
            self._put_cursor(self._cursor_index)
        elif found != self._cursor_index:
            self._cursor_index = found
            self._scroll_to_cursor()

    def _find(self, wanted: Hashable) -> int | None:
        """Return where the row of that key is, searched outwards from where it was: it seldom moves far."""
        key, rows, start = self._table.key, self._rows, self._cursor_index
        for distance in range(max(start, len(rows) - 1 - start) + 1):
            for index in {start - distance, start + distance}:
                if 0 <= index < len(rows) and key(rows[index]) == wanted:
                    return index
        return None

    def _scroll_to_cursor(self) -> None:
        page = self.size.height - HEADER_LINES
        top = self.scroll_offset.y
        if self._cursor_index < top:
            top = self._cursor_index
        elif self._cursor_index >= top + page > top:
            top = self._cursor_index - page + 1
        if top != self.scroll_offset.y:
            self.virtual_size = Size(0, len(self._rows) + HEADER_LINES)
            self.scroll_to(y=top, animate=False, force=True)

    # Drawing

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget."""
        drawn = self._drawn.get(y)
        if drawn is None:
            drawn = self._drawn[y] = self._line(y)
        cells, chosen = drawn
        return self.strip(cells, self._width, self._over(y, chosen=chosen))

    def _over(self, y: int, *, chosen: bool) -> Style | None:
        if not (chosen or y < HEADER_LINES):
            return None
        color = self.theme_color("kv-cursor" if chosen else "kv-header")
        return Style(bgcolor=color.rich_color, bold=True)

    def _line(self, y: int) -> tuple[tuple[Cell, ...], bool]:
        width = self._width
        if y < HEADER_LINES:
            return heading(self._columns, self._sort, width), False
        index = y - HEADER_LINES + self.scroll_offset.y
        if index < len(self._rows):
            row = self._rows[index]
            chosen = self._cursor is not None and index == self._cursor_index
            return line(self._table, self._columns, row, self._now, width), chosen
        hint = y - HEADER_LINES - 1
        if not self._rows and 0 <= hint < len(self._empty):
            return filled((Cell("  "), *self._empty[hint]), width), False
        return (Cell(" " * width),), False

    def _redraw_changed(self) -> None:
        for y in range(self.size.height):
            new = self._line(y)
            if self._drawn.get(y) != new:
                self._drawn[y] = new
                self.refresh(Region(0, y, self.size.width, 1))

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    def _refit(self) -> None:
        self._columns = fit(self._table.columns, self._width)
        self._drawn.clear()
        self.refresh()

    def on_resize(self, _event: events.Resize) -> None:
        """Choose the columns for the new width."""
        self._refit()
        self._scroll_to_cursor()

    def watch_show_vertical_scrollbar(self) -> None:
        """Choose the columns anew when the scrollbar takes its cell or gives it back."""
        self._refit()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Forget the drawn lines: each place shows another row now."""
        self._drawn.clear()
        super().watch_scroll_y(old_value, new_value)

    # The mouse

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the clicked row, open it on a double click, sort by a clicked title."""
        if event.y < HEADER_LINES:
            if column := column_at(self._columns, event.x):
                self.post_message(self.TitleClicked(column.id))
            return
        index = event.y - HEADER_LINES + self.scroll_offset.y
        if index < len(self._rows):
            self._put_cursor(index)
            if event.chain == 2:
                self.action_open()
