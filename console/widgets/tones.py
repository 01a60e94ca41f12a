"""From what a text means (`Tone`) to how the theme shows it, for widgets that draw lines themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, get_args

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from kvtop.console.views.table import Cell, Tone

_PREFIX = "tone"
_CLASSES = {f"{_PREFIX}--{tone or 'plain'}" for tone in get_args(Tone)}

TONES_CSS = """
& > .tone--muted { color: $kv-muted; }
& > .tone--strong { text-style: bold; }
& > .tone--good { color: $kv-good; }
& > .tone--warn { color: $kv-warn; }
& > .tone--bad { color: $kv-bad; text-style: bold; }
& > .tone--accent { color: $kv-accent; }
& > .tone--push { color: $kv-push; }
& > .tone--pull { color: $kv-pull; }
& > .tone--sim { color: $kv-warn; }
& > .tone--badge { color: $kv-sim-text; background: $kv-sim; text-style: bold; }
"""
"""Rules for a toned widget's own stylesheet."""


class Toned(Widget):
    """A widget that draws cells in the theme's tones."""

    COMPONENT_CLASSES: ClassVar[set[str]] = _CLASSES

    ALLOW_SELECT = False

    def tone_style(self, tone: Tone) -> Style:
        """Return the theme's style of `tone` on this widget's background."""
        return self.get_component_rich_style(f"{_PREFIX}--{tone or 'plain'}")

    def strip(self, cells: Iterable[Cell], width: int, over: Style | None = None) -> Strip:
        """Return cells that fill `width` as a line; `over` is laid on top of each style."""
        segments = []
        for text, tone in cells:
            style = self.tone_style(tone)
            segments.append(Segment(text, style + over if over else style))
        return Strip(segments, width)
