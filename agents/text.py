"""How kvtop words what it tells people: text from outside made fit for a terminal, counts, time spans."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Final

_BLOCKERS: Final[Mapping[str, tuple[str, str]]] = {
    "writes": ("write", "writes"),
    "reads": ("read", "reads"),
    "leases": ("lease", "leases"),
    "registrations": ("registration", "registrations"),
    "quarantine": ("in quarantine", "in quarantine"),
}
"""What one and several of each `kvtop.agents.events.Blocker` are called."""


def printable(text: str) -> str:
    """Return `text` without control characters: names and errors come from outside, and reach a terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" else c for c in text)


def noun(count: int | None, one: str, many: str = "") -> str:
    """Return what `count` of something are called; `many` is `one` with an s unless it is given.

    >>> noun(1, "block"), noun(0, "block"), noun(None, "block"), noun(2, "has", "have")
    ('block', 'blocks', 'blocks', 'have')
    """
    return one if count == 1 else many or f"{one}s"


def plural(count: int, one: str, many: str = "") -> str:
    """Return a count with what it counts; see `noun`.

    >>> plural(1, "lease"), plural(2, "transfer pushes", "transfers push")
    ('1 lease', '2 transfers push')
    """
    return f"{count} {noun(count, one, many)}"


def counted(blockers: Mapping[str, int]) -> str:
    """Return what keeps an instance from being drained as one text; empty where nothing does.

    >>> counted({"writes": 2, "leases": 1, "quarantine": 1})
    '2 writes, 1 lease, 1 in quarantine'
    """
    return ", ".join(
        plural(count, *_BLOCKERS.get(blocker, (blocker, blocker))) for blocker, count in blockers.items()
    )


def span(seconds: float) -> str:
    """Return how long something takes, never rounded to nothing.

    >>> span(60.0), span(0.5), span(9.97), span(0.04), span(0.0002)
    ('60 s', '0.5 s', '10 s', '40 ms', 'less than 1 ms')
    """
    if seconds >= 0.1:
        return f"{round(seconds, 1):g} s"
    milliseconds = round(seconds * 1e3)
    return f"{milliseconds} ms" if milliseconds else "less than 1 ms"


def age(seconds: float) -> str:
    """Return how long ago, in two units at most.

    >>> [age(s) for s in (0.2, 9.99, 75, 3725, 200_000)]
    ['0s', '9s', '1m15s', '1h02m', '2d07h']
    """
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
