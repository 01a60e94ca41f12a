"""The Transfers screen: one live line per KV transfer."""

from __future__ import annotations

from collections.abc import Sequence

from textual.widget import Widget

from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.table import TableScreen
from kvtop.console.screens.transfer import TransferScreen
from kvtop.console.views.table import Cell, Table
from kvtop.console.views.transfer_columns import COLUMNS, transfer_table
from kvtop.console.views.transfer_rows import Limit, TransferRow, backlog, empty_lines, summary, transfer_rows
from kvtop.console.widgets.grid import Grid
from kvtop.console.widgets.lines import Lines


class TransfersScreen(TableScreen[TransferRow]):
    """All transfers, live ones first; Enter opens one."""

    NAME = "Transfers"

    def body(self) -> list[Widget]:
        """Return the summary line and the table."""
        return [Lines(id="summary"), Grid(transfer_table(FleetState()), id="transfers")]

    def __init__(self) -> None:
        super().__init__()
        self.limit: Limit | None = None
        self.counts = backlog(FleetState())

    def show_only(self, limit: Limit | None) -> None:
        """Show the transfers within the limit; Esc shows all again."""
        self.limit = limit
        self.counts = backlog(self.fleet, limit)
        self.grid.clear_cursor()
        self.show_header(self.fleet, self.now, paused=False)
        self.show_table()

    def back(self) -> bool:
        """Take the cursor away, then the limit."""
        if not super().back() and self.limit is not None:
            self.show_only(None)
        return True

    def table(self) -> Table[TransferRow]:
        """Return the table for the present values."""
        return transfer_table(self.fleet)

    def rows(self) -> Sequence[TransferRow]:
        """Return the transfers in order."""
        return transfer_rows(self.fleet, self.sort, COLUMNS, self.now, self.limit)

    def empty(self) -> Sequence[tuple[Cell, ...]]:
        """Say why there is no transfer and what to do."""
        return empty_lines(self.fleet)

    def show_header(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show the header and what waits."""
        super().show_header(fleet, now, paused=paused)
        counts, limit = self.counts, self.limit
        self.query_one("#summary", Lines).show(lambda _width, _height: [summary(counts, now, limit)])

    def show(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show new values."""
        self.counts = backlog(fleet, self.limit)
        super().show(fleet, now, paused=paused)

    def on_grid_opened(self, message: Grid.Opened) -> None:
        """Open the chosen transfer's own screen."""
        row = next((row for row in self.shown if row.key == message.key), None)
        if row is not None:
            self.app.push_screen(TransferScreen(row))
