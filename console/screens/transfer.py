"""One transfer's own screen, which follows it while it moves through its stages."""

from __future__ import annotations

from textual.widget import Widget

from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.live import LiveScreen
from kvtop.console.views.detail import detail
from kvtop.console.views.table import Cell
from kvtop.console.views.transfer_rows import TransferRow, find
from kvtop.console.widgets.lines import Lines
from kvtop.console.widgets.scroll import Scroll


class TransferScreen(LiveScreen):
    """Facts and stage waterfall of the transfer that it was opened on; Esc goes back."""

    NAME = "Transfers"
    AUTO_FOCUS = "Scroll"

    def __init__(self, row: TransferRow) -> None:
        super().__init__()
        self.row = row

    def body(self) -> list[Widget]:
        """Return the detail in a scroll."""
        return [Scroll(Lines(id="detail"))]

    def show(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show the transfer as it is now; as it was last, where the agent has forgotten it."""
        super().show(fleet, now, paused=paused)
        found = find(fleet, self.row.key)
        self.row = found or self.row
        self.show_detail(now, forgotten=found is None)

    def advance(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Let the ages go on."""
        super().advance(fleet, now, paused=paused)
        self.show_detail(now, forgotten=find(fleet, self.row.key) is None)

    def show_detail(self, now: Moment, *, forgotten: bool) -> None:
        """Show the transfer's lines."""
        row = self.row
        note = (Cell(" no longer in the agent's ledger: this is its last known state", "warn"),)
        self.query_one("#detail", Lines).show(
            lambda width, _height: [*([note] if forgotten else []), *detail(row, now, width)]
        )

    def back(self) -> bool:
        """Go back to the table."""
        self.dismiss()
        return True
