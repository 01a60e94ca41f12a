"""The help screen's text, made from the action registry and the tables' own columns."""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.console.actions import ACTIONS, Scope
from kvtop.console.views import fleet_columns, fleet_rows, transfer_columns, transfer_rows
from kvtop.console.views.table import Cell, padded

_SCOPES: dict[Scope, str] = {
    "app": "Everywhere",
    "table": "Tables",
    "grid": "Rows",
    "detail": "Detail and help",
}
_KEY_NAMES = {"question_mark": "?", "escape": "Esc", "enter": "Enter", "pagedown": "PgDn", "pageup": "PgUp"}


def help_lines() -> list[tuple[Cell, ...]]:
    """Return keys, then what each column and mark means."""
    lines: list[tuple[Cell, ...]] = []
    for scope, title in _SCOPES.items():
        actions = [action for action in ACTIONS if action.scope == scope]
        if actions:
            lines.append((Cell(f" {title}", "strong"),))
        for action in actions:
            keys = " ".join(_KEY_NAMES.get(key, key.replace("ctrl+", "^")) for key in action.keys.split(","))
            lines.append(
                (
                    Cell(f"   {padded(keys, 14)}", "accent"),
                    Cell(padded(action.label, 11)),
                    Cell(action.tooltip, "muted"),
                )
            )
    lines += [
        (),
        (Cell(" Fleet: columns", "strong"),),
        *_columns((c.title, c.help) for c in fleet_columns.COLUMNS),
    ]
    lines += [
        (),
        (Cell(" Transfers: columns", "strong"),),
        *_columns((c.title, c.help) for c in transfer_columns.COLUMNS),
    ]
    lines += [(), (Cell(" Marks", "strong"),)]
    lines += [
        (Cell(f"   {mark.text} ", mark.tone), Cell(state)) for state, mark in fleet_rows.STATE_MARKS.items()
    ]
    lines += [
        (Cell(f"   {mark.text} ", mark.tone), Cell(stage))
        for stage, mark in transfer_rows.STAGE_MARKS.items()
    ]
    lines += [
        (Cell("   – "), Cell("not known; 0 is a measured nothing")),
        (Cell("   ? ", "warn"), Cell("last known before the connection was lost")),
    ]
    return lines


def _columns(columns: Iterable[tuple[str, str]]) -> list[tuple[Cell, ...]]:
    return [(Cell(f"   {padded(title or 'SIM', 10)}", "accent"), Cell(text)) for title, text in columns]
