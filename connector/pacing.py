"""Lets an engine rest between steps while all that it does is hold KV blocks for a peer.

Upstream has such an engine step without pause (measured on CPU: half a core, and with two ranks three
whole ones, taken from the peer that it waits for), to see once a step whether the blocks are fetched. The
push writer sees that by itself; the engine need only look now and then to free them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

PACE_S: Final = 0.05
"""How long freed blocks and ended leases may wait for a step of an engine that has nothing else to do."""


class EngineLoop(Protocol):
    """What is known of the loop in which the engine steps."""

    @property
    def can_rest(self) -> bool:
        """Whether it waits for input when there is no work, and can be woken from that."""

    def wake(self) -> None:
        """Have it look for work."""


class Pacer:
    """Says when the next step of a waiting engine is due, and wakes the engine for it."""

    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """Pace `loop`; `clock` gives seconds."""
        self._loop, self._clock = loop, clock
        self._stepped_s = clock()
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None

    def stepped(self) -> None:
        """Take note that the engine steps now. On the engine's thread."""
        self._stepped_s = self._clock()

    def due(self) -> bool:
        """Whether the engine, whose thread asks, should step now; if not, it will be woken in time."""
        if not self._loop.can_rest or self._remaining_s() <= 0:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._wake_in_time, name="kvtop-pacer", daemon=True)
            self._thread.start()
        self._asked.set()
        return False

    def _remaining_s(self) -> float:
        return self._stepped_s + PACE_S - self._clock()

    def _wake_in_time(self) -> None:
        while self._asked.wait():
            self._asked.clear()
            time.sleep(max(0.0, self._remaining_s()))
            self._loop.wake()
