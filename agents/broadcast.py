"""What consoles are sent: a snapshot, then what changed, encoded once for all that wait for the same.

Consoles with the same interval are served in the same instant, so that ten of them cost little more than one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kvtop.agents.facts import Host
from kvtop.agents.instances import Instances
from kvtop.agents.ledger import Ledger
from kvtop.agents.model import Delta, Instance, Node, Snapshot
from kvtop.agents.wire import encode_frame

MIN_INTERVAL_S: Final = 0.1
SHARED_S: Final = 0.02
"""How old what others were sent may be, to be sent once more."""


class Mark(NamedTuple):
    """How much a console has been told."""

    version: int
    """The ledger's."""
    instances: dict[str, Instance]
    host: Host | None


class Broadcast:
    """Frames for consoles, from what the agent knows at this moment."""

    def __init__(
        self,
        instances: Instances,
        ledger: Ledger,
        node: Callable[[], Node],
        host: Callable[[], Host | None],
    ) -> None:
        """Tell what these know."""
        self._instances, self._ledger, self._node, self._host = instances, ledger, node, host
        self._built_s = 0.0
        self._frames: dict[int, tuple[bytes, Mark]] = {}
        """By the id of the mark, which is kept so that its id stays its own: what came after it."""
        self._now = Mark(0, {}, None)
        """What who is served now has been told then; that it may be told a little more does no harm."""

    def snapshot(self, finished: int) -> tuple[bytes, Mark]:
        """Return a frame with all that is known, with at most `finished` ended transfers."""
        self._built_s = 0.0  # who asks once gets what holds now
        self._refresh()
        told = Snapshot(
            node=self._node(),
            instances=list(self._now.instances.values()),
            transfers=self._ledger.snapshot(max(0, finished)),
            host=self._now.host,
        )
        return encode_frame(told), self._now

    def since(self, mark: Mark) -> tuple[bytes, Mark] | None:
        """Return a frame with what changed since; None where that is too long ago to be told whole."""
        if mark.version < self._ledger.complete_since:
            return None
        self._refresh()
        if id(mark) not in self._frames:
            self._frames[id(mark)] = self._changes(mark), mark
        return self._frames[id(mark)][0], self._now

    def _changes(self, mark: Mark) -> bytes:
        changed, forgotten = self._ledger.changes(mark.version)
        known, now = mark.instances, self._now.instances
        return encode_frame(
            Delta(
                node=self._node(),
                instances=[each for engine_id, each in now.items() if known.get(engine_id) != each],
                transfers=changed,
                forgotten=forgotten,
                gone=sorted(known.keys() - now.keys()),
                host=None if self._now.host == mark.host else self._now.host,
            )
        )

    def _refresh(self) -> None:
        """Look anew at the instances, unless that was done a moment ago."""
        now_s = time.monotonic()
        if not self._built_s <= now_s < self._built_s + SHARED_S:
            self._built_s = now_s
            self._frames.clear()
            instances = self._instances.freeze(time.monotonic_ns())
            known = {each.engine_id: each for each in instances}
            self._now = Mark(self._ledger.version, known, self._host())


async def next_beat(interval_s: float) -> None:
    """Wait until consoles of this interval are served next: all at multiples of it."""
    interval_s = max(MIN_INTERVAL_S, interval_s)
    wait_s = interval_s - time.monotonic() % interval_s
    await asyncio.sleep(wait_s if wait_s >= MIN_INTERVAL_S / 2 else wait_s + interval_s)
