"""A screen around one sortable live table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from kvtop.console.actions import bindings
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.live import LiveScreen
from kvtop.console.views.table import Cell, RowT, Sort, Table, next_sort, sort_by
from kvtop.console.widgets.grid import Grid


class TableScreen(LiveScreen, Generic[RowT]):
    """Owns the table's order; what the rows are is the subclass's."""

    BINDINGS = bindings("table")

    def __init__(self) -> None:
        super().__init__()
        self.sort: Sort | None = None
        self.fleet = FleetState()
        self.now = Moment(0.0, 0.0)
        self.shown: Sequence[RowT] = ()

    def table(self) -> Table[RowT]:
        """Return the table for the present values."""
        raise NotImplementedError

    def rows(self) -> Sequence[RowT]:
        """Return the rows in order."""
        raise NotImplementedError

    def empty(self) -> Sequence[tuple[Cell, ...]]:
        """Return what to say where there is no row."""
        return ()

    @property
    def grid(self) -> Grid[RowT]:
        """The table's widget."""
        return self.query_one(Grid)

    def show(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show new values."""
        self.fleet, self.now = fleet, now
        super().show(fleet, now, paused=paused)
        self.show_table()

    def advance(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Let the clock and the ages go on."""
        super().advance(fleet, now, paused=paused)
        self.now = now
        self.grid.advance(now)

    def show_table(self) -> None:
        """Show the rows of the present values in the present order."""
        self.shown = self.rows()
        self.grid.show(self.table(), self.shown, self.now, self.sort, self.empty())

    def action_sort(self) -> None:
        """Order by the next column that is shown."""
        self.sort = next_sort(self.sort, self.grid.columns)
        self.show_table()

    def action_reverse(self) -> None:
        """Turn the order round."""
        if self.sort is None:
            self.sort = next_sort(None, self.grid.columns)
        else:
            self.sort = Sort(self.sort.column, not self.sort.descending)
        self.show_table()

    def on_grid_title_clicked(self, message: Grid.TitleClicked) -> None:
        """Order by the clicked column."""
        column = next(c for c in self.grid.columns if c.id == message.column)
        self.sort = sort_by(self.sort, column)
        self.show_table()

    def back(self) -> bool:
        """Take the cursor away."""
        return self.grid.clear_cursor()
