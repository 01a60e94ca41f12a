"""The Fleet screen: instances grouped by node, and the latency of the chosen scope below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from textual.message import Message
from textual.widget import Widget

from kvtop.console.clock import Moment
from kvtop.console.fleet.figures import Figures
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.table import TableScreen
from kvtop.console.views.fleet_columns import COLUMNS, fleet_table
from kvtop.console.views.fleet_rows import FleetRow, fleet_rows
from kvtop.console.views.histogram import Scope, histogram, side_by_side
from kvtop.console.views.table import Cell, Table
from kvtop.console.views.transfer_rows import Limit
from kvtop.console.widgets.grid import Grid
from kvtop.console.widgets.lines import Lines


class FleetScreen(TableScreen[FleetRow]):
    """Instances by node; TTFT and ITL histograms of the row under the cursor, of the fleet without one."""

    class Drilled(Message):
        """The operator wants the transfers of one row; None: of all."""

        def __init__(self, limit: Limit | None) -> None:
            super().__init__()
            self.limit = limit

    NAME = "Fleet"

    def body(self) -> list[Widget]:
        """Return the table and the two histograms."""
        return [
            Grid(fleet_table(FleetState()), id="instances"),
            Lines(id="latency"),
        ]

    def table(self) -> Table[FleetRow]:
        """Return the table for the present values."""
        return fleet_table(self.fleet)

    def rows(self) -> Sequence[FleetRow]:
        """Return fleet, nodes and instances in order."""
        return fleet_rows(self.fleet, self.sort, COLUMNS, self.now)

    def show(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show new values."""
        super().show(fleet, now, paused=paused)
        self.show_latency()

    def show_latency(self) -> None:
        """Show the histograms of the chosen row's scope."""
        chosen = self.scope()
        self.query_one("#latency", Lines).show(
            lambda width, height: side_by_side(
                _histogram(chosen, "ttft", width // 2, height),
                _histogram(chosen, "itl", width - width // 2, height),
            )
        )

    def scope(self) -> Figures:
        """Return the figures of the row under the cursor, of the fleet where there is none."""
        rows = self.shown or self.rows()
        chosen = next((row for row in rows if row.key == self.grid.cursor), rows[0])
        return chosen.figures

    def on_grid_opened(self, message: Grid.Opened) -> None:
        """Ask for the transfers of the chosen instance, node or fleet."""
        row = next((row for row in self.shown if row.key == message.key), None)
        if row is not None:
            self.post_message(self.Drilled(drill(row)))

    def on_grid_cursor_moved(self) -> None:
        """Show the latency of the row that was chosen."""
        self.show_latency()


def drill(row: FleetRow) -> Limit | None:
    """Return which transfers belong to a row."""
    if row.node is None:
        return None
    if row.instance is None:
        return Limit(row.node.target, row.node.target)
    return Limit(row.instance.name, row.node.target, row.instance.engine_id)


def _histogram(
    figures: Figures, which: Literal["ttft", "itl"], width: int, height: int
) -> list[tuple[Cell, ...]]:
    latency = figures.latency
    why_empty = "" if figures.heard else "no agent is connected"
    scope = Scope(which.upper(), figures.label, latency.window_s if latency else None, why_empty)
    sketch = getattr(latency, which) if latency else None
    return histogram(sketch, scope, width - 1, height)
