"""The demo without a terminal: send so many requests, and tell what the client and the ledger saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Final

from kvtop.agents.model import LIVE_STAGES, Delta, Snapshot, Transfer
from kvtop.console.demo.load import Outcome
from kvtop.console.demo.processes import NotReady, Running
from kvtop.console.fleet.dial import DialOptions, dialler
from kvtop.console.fleet.targets import parse_target

UPDATE_S: Final = 0.2
SETTLE_TIMEOUT_S: Final = 15.0
"""How long the ledger may take to show the end of a transfer whose request the client saw end."""


class Ledger:
    """The agent's transfers, followed over SSH from before the load starts: the agent forgets old ones."""

    def __init__(self, target: str, options: DialOptions) -> None:
        """Follow the agent of this host argument."""
        self._target = parse_target(target)
        self._options = options
        self.rows: dict[int, Transfer] = {}

    @property
    def ended(self) -> int:
        """How many transfers have ended."""
        return sum(row.stage not in LIVE_STAGES for row in self.rows.values())

    async def follow(self, until: Callable[[], bool], timeout_s: float) -> None:
        """Follow until the condition holds.

        Raises:
            ConnectError: the agent cannot be reached, or the conversation ended.
            NotReady: the condition does not hold within `timeout_s`.
        """
        conversation = await dialler(self._options)(self._target)
        try:
            async with asyncio.timeout(timeout_s):
                async for message in conversation.updates(UPDATE_S):
                    self._take(message)
                    if until():
                        return
        except TimeoutError:
            raise NotReady(f"the load did not end within {timeout_s:g} s") from None
        finally:
            await conversation.aclose()

    def _take(self, message: Snapshot | Delta) -> None:
        """Keep what ended though the agent forgets it; a live row that goes was joined with another one."""
        self.rows.update({row.id: row for row in message.transfers})
        for row_id in message.forgotten if isinstance(message, Delta) else ():
            if row_id in self.rows and self.rows[row_id].stage in LIVE_STAGES:
                del self.rows[row_id]


def read_outcomes(load: Running) -> list[Outcome]:
    """Return what the load has written so far; a line that is still being written is left out."""
    lines = load.log.read_text().splitlines(keepends=True) if load.log.exists() else []
    return [Outcome(**json.loads(line)) for line in lines if line.startswith("{") and line.endswith("}\n")]


def ended_with(
    ledger: Ledger, load: Running | None, requests: int, check: Callable[[], None]
) -> Callable[[], bool]:
    """Return whether all requests have ended and the ledger has caught up, or had its time to.

    Without a load (simulated engines make their own), so many transfers must have ended. `check` raises if
    there is nothing to wait for any more.
    """
    over_since_s: float | None = None

    def ended() -> bool:
        nonlocal over_since_s
        check()
        if load is None:
            return ledger.ended >= requests
        outcomes = read_outcomes(load)
        if len(outcomes) < requests:
            return False
        over_since_s = over_since_s or time.monotonic()
        caught_up = ledger.ended >= sum(outcome.ok for outcome in outcomes)
        return caught_up or time.monotonic() - over_since_s > SETTLE_TIMEOUT_S

    return ended
