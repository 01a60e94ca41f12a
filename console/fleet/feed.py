"""What the terminal UI needs from a fleet: a live one, a test's or a recording's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvtop.console.fleet.state import FleetState


class Feed(Protocol):
    """A source of states."""

    def states(self) -> AsyncIterator[FleetState]:
        """Yield the present state at once, then a new one after a change, at most one per tick."""
        ...

    async def aclose(self) -> None:
        """Close the connections behind it."""
        ...
