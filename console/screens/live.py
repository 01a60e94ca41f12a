"""What the screens share: header, notices, footer, and being shown anew at each tick."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState
from kvtop.console.views.header import header, notices
from kvtop.console.widgets.footer import KeyBar
from kvtop.console.widgets.lines import Lines


class LiveScreen(Screen[None]):
    """A screen of the fleet at one moment."""

    class CameUp(Message):
        """The screen is on top now and may show old values."""

    NAME: ClassVar[str] = ""
    """Its name in the header."""
    AUTO_FOCUS = "Grid"

    def compose(self) -> ComposeResult:
        """Lay out header, body, notices and footer."""
        yield Lines(id="header")
        yield from self.body()
        yield Lines(id="notices")
        yield KeyBar(id="keys")

    def body(self) -> list[Widget]:
        """Return the widgets between header and notices."""
        raise NotImplementedError

    def show(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show new values."""
        self.show_header(fleet, now, paused=paused)

    def advance(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show the same values at a later moment."""
        self.show_header(fleet, now, paused=paused)

    def show_header(self, fleet: FleetState, now: Moment, *, paused: bool) -> None:
        """Show the header and the notices."""
        self.query_one("#header", Lines).show(
            lambda width, _height: [header(fleet, now, self.NAME, width, paused=paused)]
        )
        self.query_one("#notices", Lines).show(lambda _width, _height: notices(fleet, now))

    def on_screen_resume(self) -> None:
        """Ask for the present values."""
        self.post_message(self.CameUp())

    def back(self) -> bool:
        """Undo the latest step of the operator; return whether there was one."""
        return False
