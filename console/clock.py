"""Time as the console reads it, so that tests and replays can say what time it is."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class Moment(NamedTuple):
    """One reading of this machine's clocks."""

    wall_s: float
    """Unix time."""
    monotonic_s: float


class Clock(Protocol):
    """Anything that tells the time."""

    def now(self) -> Moment:
        """Return the present moment."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> Moment:
        """Return the present moment."""
        return Moment(time.time(), time.monotonic())
