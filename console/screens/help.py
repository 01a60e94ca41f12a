"""The help screen: keys, columns and marks."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen

from kvtop.console.views.help import help_lines
from kvtop.console.widgets.lines import Lines
from kvtop.console.widgets.scroll import Scroll


class HelpScreen(Screen[None]):
    """Generated from the action registry and the tables' columns; Esc or ? closes it."""

    def compose(self) -> ComposeResult:
        """Lay out the text in a scroll."""
        with Scroll(id="help") as box:
            box.border_title = "kvtop: help"
            box.border_subtitle = "Esc closes"
            yield Lines()

    def on_mount(self) -> None:
        """Show the text."""
        self.query_one(Lines).show(lambda _width, _height: help_lines())

    def back(self) -> bool:
        """Close."""
        self.dismiss()
        return True
