"""A text that scrolls with the keys of the tables."""

from __future__ import annotations

from textual.containers import VerticalScroll

from kvtop.console.actions import bindings


class Scroll(VerticalScroll, can_focus=True):
    """Arrows, Page keys, j/k and g/G move; Esc goes back."""

    BINDINGS = bindings("detail")
