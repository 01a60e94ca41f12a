"""All targets together: one state per tick, however many nodes changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

from kvtop.console.clock import Clock, SystemClock
from kvtop.console.fleet.conversation import Dial
from kvtop.console.fleet.link import Link
from kvtop.console.fleet.state import FleetState
from kvtop.console.fleet.targets import Target

SETTLE_S: Final = 0.05
"""How long after a change others may join it in the same state."""


class Fleet:
    """Follows every target; a `Feed` for the terminal UI."""

    def __init__(
        self, targets: Iterable[Target], dial: Dial, *, clock: Clock | None = None, interval_s: float = 1.0
    ) -> None:
        self._changed = asyncio.Event()
        self._interval_s = interval_s
        self._links = [
            Link(target, dial, clock or SystemClock(), interval_s=interval_s, changed=self._changed.set)
            for target in targets
        ]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> FleetState:
        """The present state of all targets, in the order in which they were named."""
        return FleetState(tuple(link.state for link in self._links))

    async def states(self) -> AsyncIterator[FleetState]:
        """Start the connections; yield the present state at once, then one per tick with a change.

        Raises:
            Exception: a bug in a link; a target that cannot be reached is a state, not an exception.
        """
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]
        watch = asyncio.create_task(self._until_a_link_breaks())
        try:
            while True:
                self._changed.clear()
                yield self.state
                waiting = asyncio.create_task(self._next_tick(time.monotonic()))
                await asyncio.wait((waiting, watch), return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    waiting.cancel()
                    watch.result()
                    return
        finally:
            watch.cancel()
            await self.aclose()

    async def _next_tick(self, latest_s: float) -> None:
        """Wait for a change, then for the other nodes of the same tick; first data is not held up."""
        shown = any(link.state.live for link in self._links)
        await self._changed.wait()
        left_s = latest_s + self._interval_s - time.monotonic() if shown else 0.0
        await asyncio.sleep(max(SETTLE_S, left_s))

    async def _until_a_link_breaks(self) -> None:
        await asyncio.gather(*self._tasks)

    async def aclose(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
