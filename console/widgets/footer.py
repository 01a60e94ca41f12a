"""The footer: the keys that work now, on one line. A click on one does the same as the key."""

from __future__ import annotations

from collections.abc import Iterable

from textual.binding import Binding
from textual.events import Click
from textual.screen import Screen

from kvtop.console.views.table import Cell
from kvtop.console.widgets.lines import Lines


class KeyBar(Lines):
    """Shows the bindings that the screen marks as shown, as far as the line goes."""

    def on_mount(self) -> None:
        """Follow the focus: another widget may bind other keys."""
        self.screen.bindings_updated_signal.subscribe(self, self._follow)
        self._follow(self.screen)

    def _follow(self, screen: Screen[object]) -> None:
        if screen is self.screen:
            self.show(lambda _width, _height: [tuple(self._cells())])

    def _cells(self) -> Iterable[Cell]:
        for binding in self._shown():
            yield Cell(f" {self.app.get_key_display(binding)}", "accent")
            yield Cell(f" {binding.description}")

    def _shown(self) -> list[Binding]:
        """Return one binding for each action, in the order in which the focused widget reaches them."""
        shown: dict[str, Binding] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.show and active.enabled:
                shown.setdefault(active.binding.action, active.binding)
        return list(shown.values())

    def on_click(self, event: Click) -> None:
        """Press the key that was clicked."""
        x = event.x
        for binding in self._shown():
            x -= len(f" {self.app.get_key_display(binding)} {binding.description}")
            if x < 0:
                self.app.simulate_key(binding.key)
                return
