"""Text that comes from outside, made fit for a terminal."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Return `text` without control characters: names and errors come from outside, and reach a terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" else c for c in text)
