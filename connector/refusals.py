"""Why P will not write for a request, remembered for a registration or blocks that are still to come."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvtop.agents.events import ErrorClass

KEPT: Final = 4096
KEPT_S: Final = 120.0


class Refusal(NamedTuple):
    """Why nothing is written for a request."""

    error_class: ErrorClass
    reason: str
    by_decode: bool
    """Whether D wants nothing; else P has nothing to give."""


class Refusals:
    """The latest refusals, by request id without vLLM's random suffix. Owned by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty; `clock` gives seconds."""
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, Refusal]] = OrderedDict()

    def remember(self, base_id: str, refusal: Refusal) -> None:
        """Keep a refusal for a while."""
        self._kept.pop(base_id, None)
        self._kept[base_id] = (self._clock(), refusal)
        self._prune()

    def of_prefill(self, base_id: str) -> Refusal | None:
        """Return why P has nothing to give, None where it has not said so."""
        return self._find(base_id, by_decode=False)

    def take_of_decode(self, base_id: str) -> Refusal | None:
        """Return why D wants nothing, and forget it: it is about one hand-over."""
        found = self._find(base_id, by_decode=True)
        if found is not None:
            del self._kept[base_id]
        return found

    def begin(self, base_id: str) -> None:
        """Let a request begin (again) on P under an id of which an earlier one had nothing to give."""
        if self._find(base_id, by_decode=False) is not None:
            del self._kept[base_id]

    def _find(self, base_id: str, *, by_decode: bool) -> Refusal | None:
        self._prune()
        kept = self._kept.get(base_id)
        return kept[1] if kept and kept[1].by_decode == by_decode else None

    def _prune(self) -> None:
        oldest_s = self._clock() - KEPT_S
        while self._kept and (len(self._kept) > KEPT or next(iter(self._kept.values()))[0] < oldest_s):
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._kept)
