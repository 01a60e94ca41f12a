"""From what a text means (`Tone`) to how the theme shows it, for widgets that draw lines themselves.

Styles come straight from the theme's variables. Component classes would do the same, but cost each widget a
round through the stylesheet for each tone, which is felt before the first frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip
from textual.widget import Widget

from kvtop.console.views.table import Cell, Tone

_COLORS: dict[Tone, str] = {
    "muted": "kv-muted",
    "good": "kv-good",
    "warn": "kv-warn",
    "bad": "kv-bad",
    "accent": "kv-accent",
    "push": "kv-push",
    "pull": "kv-pull",
    "sim": "kv-warn",
    "badge": "kv-sim-text",
}
_BACKGROUNDS: dict[Tone, str] = {"badge": "kv-sim"}
_BOLD: frozenset[Tone] = frozenset({"strong", "bad", "badge"})


class Toned(Widget):
    """A widget that draws cells in the theme's tones."""

    ALLOW_SELECT: ClassVar[bool] = False

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - textual's name
        super().__init__(id=id)
        self._tones: dict[Tone, Style] = {}

    def notify_style_update(self) -> None:
        """Forget the styles of the former theme."""
        self._tones.clear()
        super().notify_style_update()

    def tone_style(self, tone: Tone) -> Style:
        """Return the theme's style of `tone` on this widget's background."""
        style = self._tones.get(tone)
        if style is None:
            style = self._tones[tone] = self._styled(tone)
        return style

    def _styled(self, tone: Tone) -> Style:
        style = self.rich_style + Style(bold=tone in _BOLD)
        if tone in _BACKGROUNDS:
            style += Style(bgcolor=self.theme_color(_BACKGROUNDS[tone]).rich_color)
        if tone in _COLORS:
            style += Style(color=self.theme_color(_COLORS[tone]).rich_color)
        return style

    def theme_color(self, variable: str) -> Color:
        """Return a theme variable's colour as it looks on this widget's background."""
        ground = self.background_colors[1]
        name, _, percent = self.app.theme_variables[variable].partition(" ")  # as in "auto 60%"
        share = float(percent.rstrip("%")) / 100 if percent else 1.0
        color = ground.get_contrast_text() if name == "auto" else Color.parse(name)
        return color if color.ansi is not None else ground + color.multiply_alpha(share)

    def strip(self, cells: Iterable[Cell], width: int, over: Style | None = None) -> Strip:
        """Return cells that fill `width` as a line; `over` is laid on top of each style, but of badges."""
        segments = []
        for text, tone in cells:
            style = self.tone_style(tone)
            segments.append(Segment(text, style + over if over and tone != "badge" else style))
        return Strip(segments, width)
