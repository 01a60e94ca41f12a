"""How much of the audit file those may fill who may only look.

Whoever can open the view socket can have commands refused, as fast as the agent answers. The file is bounded,
so records of such refusals would push out those of what was done. So of each client the first few of a minute
are recorded one by one, and the others of that minute by their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtop.agents.who import Who

MOST: Final = 10
"""Refusals of one client that are recorded one by one within `WINDOW_S`."""
WINDOW_S: Final = 60.0

Summarize = Callable[[Who, int], object]


class _Window:
    """The refusals of one client since the first of them."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.count = 0


class Refusals:
    """Counts refusals by client; says which are to be recorded."""

    def __init__(self, summarize: Summarize, *, most: int = MOST, window_s: float = WINDOW_S) -> None:
        """Call `summarize` with a client and how many of its refusals were not recorded, once a window."""
        self._summarize, self._most, self._window_s = summarize, most, window_s
        self._windows: dict[Who, _Window] = {}

    def recorded(self, who: Who) -> bool:
        """Count one refusal; return whether it is to be recorded by itself. Call it on the agent's loop."""
        client = replace(who, ssh_address="")  # one key may come from many ports
        window = self._windows.get(client)
        if window is None:
            timer = asyncio.get_running_loop().call_later(self._window_s, self._close, client)
            window = self._windows[client] = _Window(timer)
        window.count += 1
        return window.count <= self._most

    def close(self) -> None:
        """Summarize what is not yet summarized."""
        for client in list(self._windows):
            self._close(client)

    def _close(self, client: Who) -> None:
        window = self._windows.pop(client)
        window.timer.cancel()
        if window.count > self._most:
            self._summarize(client, window.count - self._most)
