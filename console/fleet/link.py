"""One target's connection, which comes back by itself and never forgets what it last heard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvtop.agents.mirror import Mirror
from kvtop.console.clock import Clock, Moment
from kvtop.console.fleet.conversation import Conversation, Dial
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.state import LinkPhase, LinkState, NodeState
from kvtop.console.fleet.targets import Target

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MOST_S: Final = 10.0
BACKOFF_JITTER: Final = 0.3
"""Share by which a wait varies, so that a fleet does not reconnect all at once."""


def backoff_s(attempt: int, draw: Callable[[], float]) -> float:
    """Return how long to wait after failed attempt number `attempt` (from 1); `draw` gives 0 to 1.

    >>> [backoff_s(n, lambda: 0.5) for n in (1, 2, 3, 20)]
    [0.5, 1.0, 2.0, 10.0]
    """
    wait = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(attempt - 1, 10))
    return wait * (1 + BACKOFF_JITTER * (2 * draw() - 1))


class Link:
    """Keeps one conversation going and the last known state of its node."""

    def __init__(
        self,
        target: Target,
        dial: Dial,
        clock: Clock,
        *,
        interval_s: float,
        changed: Callable[[], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._target = target
        self._dial = dial
        self._clock = clock
        self._interval_s = interval_s
        self._changed = changed
        self._draw = draw
        self._mirror: Mirror | None = None
        self._received: Moment | None = None
        self._link = LinkState("connecting", clock.now().wall_s)
        self._state: NodeState | None = None

    @property
    def state(self) -> NodeState:
        """The present state; the same object until something changes."""
        if self._state is None:
            self._state = self._read()
        return self._state

    async def run(self) -> None:
        """Connect, follow, and connect again, until cancelled."""
        attempt = 0
        while True:
            try:
                conversation = await self._dial(self._target)
            except ConnectError as error:
                attempt += 1
                self._turn("lost", error, attempt)
            else:
                ended = await self._follow(conversation)
                attempt = 0
                self._turn("lost", ended, 0)
            await asyncio.sleep(backoff_s(max(1, attempt), self._draw))

    async def _follow(self, conversation: Conversation) -> ConnectError:
        """Take over messages until the conversation ends; return why it did."""
        mirror = Mirror()
        try:
            async for message in conversation.updates(self._interval_s):
                mirror.apply(message)
                self._mirror, self._received = mirror, self._clock.now()
                self._turn("live", None, 0)
        except ConnectError as error:
            return error
        finally:
            with suppress(ConnectError):
                await conversation.aclose()
        return ConnectError(self._target.label, "lost", "the agent closed the connection")

    def _turn(self, phase: LinkPhase, error: ConnectError | None, attempts: int) -> None:
        since_s = self._link.since_s if self._link.phase == phase else self._clock.now().wall_s
        self._link = LinkState(phase, since_s, error, attempts)
        self._state = None
        self._changed()

    def _read(self) -> NodeState:
        mirror = self._mirror
        if mirror is None:
            return NodeState(self._target.label, self._link)
        return NodeState(
            target=self._target.label,
            link=self._link,
            node=mirror.node,
            instances=tuple(mirror.instances.values()),
            transfers=dict(mirror.transfers),
            received=self._received,
            host=mirror.host,
        )
