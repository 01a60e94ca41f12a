"""What D waits for, until when, and which of its blocks nobody may use because a write may still reach them.

vLLM frees the blocks of a request whose KV did not come and computes it anew in others (or fails it). A write
that cannot be stopped would then land in blocks that are someone else's: wrong tokens with HTTP 200. So the
blocks of whatever ended early are kept in use (one more reference in vLLM's block pool) until the workers say
that nothing can be written any more.

Runs on the engine's thread alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtop.agents.events import Direction


@dataclass(frozen=True)
class Awaited:
    """One request whose KV is to come."""

    direction: Direction
    blocks: Sequence[Any]
    """vLLM's `KVCacheBlock`s that are written to."""
    deadline_s: float
    """time.monotonic()."""


@dataclass(frozen=True)
class Quarantined:
    """Blocks of a request that ended while they may still be written to."""

    direction: Direction
    blocks: Sequence[Any]
    since_ns: int
    """CLOCK_MONOTONIC."""


class Inbound:
    """The KV that D waits for, and the quarantine."""

    def __init__(self, *, deadline_s: float, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            deadline_s: how long a request waits from its allocation, in seconds.
            ranks: how many workers must agree that nothing can be written any more.
            clock: the time in seconds.
        """
        self.awaited: dict[str, Awaited] = {}
        self.quarantine: dict[str, Quarantined] = {}
        self.block_pool: Any = None
        """vLLM's BlockPool, bound by the scheduler after construction."""
        self._deadline_s, self._ranks, self._clock = deadline_s, ranks, clock
        self._settled: Counter[str] = Counter()

    def expect(self, request_id: str, direction: Direction, blocks: Sequence[Any]) -> None:
        """Wait for KV to be written into these blocks."""
        self.awaited[request_id] = Awaited(direction, blocks, self._clock() + self._deadline_s)

    def overdue(self) -> Iterator[tuple[str, Awaited]]:
        """Yield what has been waited for long enough; each once a deadline."""
        now = self._clock()
        for request_id, each in list(self.awaited.items()):
            if each.deadline_s > now:
                return  # insertion order is deadline order
            del self.awaited[request_id]
            self.awaited[request_id] = Awaited(each.direction, each.blocks, now + self._deadline_s)
            yield request_id, each

    def arrived(self, request_id: str) -> None:
        """Take note that the KV is there, on all ranks."""
        self.awaited.pop(request_id, None)
        self._settled.pop(request_id, None)

    def failed(self, request_id: str) -> bool:
        """Keep a failed request's blocks from reuse; call it before vLLM frees them.

        Returns whether they are in quarantine now; they are not where all ranks have settled already.
        """
        each = self.awaited.pop(request_id, None)
        if each is None or not each.blocks or self._settled[request_id] >= self._ranks:
            self._settled.pop(request_id, None)
            return False
        self.block_pool.touch(each.blocks)
        self.quarantine[request_id] = Quarantined(each.direction, each.blocks, time.monotonic_ns())
        return True

    def settle(self, ranks: Counter[str]) -> list[str]:
        """Take from how many more ranks' view each request is over; return whose blocks are free now."""
        self._settled.update(ranks)
        freed = []
        for request_id in ranks:
            if self._settled[request_id] < self._ranks:
                continue
            each = self.quarantine.pop(request_id, None)
            if each is None:
                if request_id not in self.awaited:
                    del self._settled[request_id]
                continue
            del self._settled[request_id]
            self.block_pool.free_blocks(reversed(each.blocks))
            freed.append(request_id)
        return freed

    @property
    def quarantined_blocks(self) -> int:
        """How many blocks nobody may use."""
        return sum(len(each.blocks) for each in self.quarantine.values())

    @property
    def quarantined_since_ns(self) -> int | None:
        """Since when the oldest of them are, None where there are none."""
        return min((each.since_ns for each in self.quarantine.values()), default=None)
