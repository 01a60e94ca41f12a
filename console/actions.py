"""The one registry of what keys do: bindings, footer, help and palette are made from it.

Ctrl+A and Ctrl+B stay unbound: they belong to terminal multiplexers. Every action has an id, so that a
keymap can move it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from textual.binding import BindingType

Scope = Literal["app", "grid", "table", "detail"]
"""Where the keys work: everywhere, on a live table, on a sortable screen, on a text that scrolls."""


class Action(msgspec.Struct, frozen=True):
    """Something that the operator can do."""

    id: str
    scope: Scope
    keys: str
    """Textual's names, comma-separated; the first one is shown."""
    call: str
    """Textual's action string."""
    label: str
    tooltip: str
    shown: bool = False
    """Whether the footer has room for it."""
    first: bool = False
    """Whether it goes before what the focused widget binds."""
    key_display: str | None = None


ACTIONS: tuple[Action, ...] = (
    Action("app.quit", "app", "q", "quit", "Quit", "Leave kvtop; nothing on the fleet changes.", shown=True),
    Action(
        "app.interrupt",
        "app",
        "ctrl+c,ctrl+q",
        "quit",
        "Quit",
        "Leave kvtop; never touches a target.",
        first=True,
    ),
    Action(
        "app.help",
        "app",
        "question_mark",
        "help",
        "Help",
        "Keys, columns and marks of this screen.",
        shown=True,
        key_display="?",
    ),
    Action("screen.fleet", "app", "1", "mode('fleet')", "Fleet", "Instances grouped by node.", shown=True),
    Action(
        "screen.transfers",
        "app",
        "2",
        "mode('transfers')",
        "Transfers",
        "One live line per KV transfer.",
        shown=True,
    ),
    Action(
        "app.pause",
        "app",
        "p",
        "pause",
        "Pause",
        "Hold what is shown; the connections go on.",
        shown=True,
    ),
    Action("app.theme", "app", "t", "next_theme", "Theme", "Next of kvtop's themes.", shown=True),
    Action(
        "app.back",
        "app",
        "escape",
        "back",
        "Back",
        "Close what is open, else take the cursor away.",
        key_display="Esc",
    ),
    Action("table.sort", "table", "s", "sort", "Sort", "Order by the next column.", shown=True),
    Action("table.reverse", "table", "S", "reverse", "Reverse", "Turn the order round.", shown=True),
    Action(
        "grid.open",
        "grid",
        "enter",
        "open",
        "Open",
        "Open the row under the cursor: a transfer in full, an instance's or a node's transfers.",
        shown=True,
        key_display="Enter",
    ),
    Action("grid.down", "grid", "down,j", "move(1)", "Down", "Next row."),
    Action("grid.up", "grid", "up,k", "move(-1)", "Up", "Previous row."),
    Action("grid.page_down", "grid", "pagedown,ctrl+d", "page(1)", "Page down", "A page further."),
    Action("grid.page_up", "grid", "pageup,ctrl+u", "page(-1)", "Page up", "A page back."),
    Action("grid.home", "grid", "home,g", "home", "First", "First row."),
    Action("grid.end", "grid", "end,G", "end", "Last", "Last row."),
    Action(
        "detail.back",
        "detail",
        "escape",
        "app.back",
        "Back",
        "Back to the table.",
        shown=True,
        key_display="Esc",
    ),
    Action("detail.down", "detail", "j", "scroll_down", "Down", "A line further."),
    Action("detail.up", "detail", "k", "scroll_up", "Up", "A line back."),
    Action("detail.home", "detail", "g", "scroll_home", "First", "To the first line."),
    Action("detail.end", "detail", "G", "scroll_end", "Last", "To the last line."),
)


def bindings(scope: Scope) -> list[BindingType]:
    """Return the scope's actions as Textual bindings."""
    from textual.binding import Binding  # noqa: PLC0415 - the registry serves commands without a screen too

    return [
        Binding(
            action.keys,
            action.call,
            action.label,
            id=action.id,
            show=action.shown,
            priority=action.first,
            tooltip=action.tooltip,
            key_display=action.key_display,
        )
        for action in ACTIONS
        if action.scope == scope
    ]
