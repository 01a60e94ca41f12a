"""A widget that shows lines of cells and redraws only those that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.events import Resize
from textual.geometry import Region, Size
from textual.strip import Strip

from kvtop.console.views.table import Cell, filled
from kvtop.console.widgets.tones import Toned

Draw = Callable[[int, int], Sequence[tuple[Cell, ...]]]
"""(width, height) in cells to lines. A height of 0 means as many lines as it takes."""


class Lines(Toned):
    """Shows what a pure function makes of the widget's size."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - textual's name
        super().__init__(id=id)
        self._draw: Draw = lambda _width, _height: ()
        self._lines: list[tuple[Cell, ...]] = []

    def show(self, draw: Draw) -> None:
        """Show what `draw` returns, now and after each change of size."""
        self._draw = draw
        lines = self._compute(self.size.width, self.size.height)
        if len(lines) != len(self._lines) and self.styles.is_auto_height:
            self._lines = lines
            self.refresh(layout=True)
            return
        old, self._lines = self._lines, lines
        for y in range(max(len(old), len(lines))):
            if old[y : y + 1] != lines[y : y + 1]:
                self.refresh(Region(0, y, self.size.width, 1))

    @property
    def texts(self) -> list[str]:
        """The lines as plain text."""
        return ["".join(cell.text for cell in line) for line in self._lines]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return how many lines there are to show."""
        return len(self._draw(width, 0))

    def on_resize(self, event: Resize) -> None:
        """Compute the lines for the new size."""
        self._lines = self._compute(event.size.width, event.size.height)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line."""
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        return self.strip(self._lines[y], width)

    def _compute(self, width: int, height: int) -> list[tuple[Cell, ...]]:
        if not width:
            return []
        wanted = 0 if self.styles.is_auto_height else height
        return [filled(line, width) for line in self._draw(width, wanted)]
