"""The transfer ledger: every KV transfer as one row that joins what P and D report.

A row is a set of facts, and its stage is derived from them, so that the order in which the two sides' reports
arrive does not matter. Live rows are all kept; finished ones in a bounded ring.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final

from kvtop.agents.events import Side, TransferEvent
from kvtop.agents.model import Transfer
from kvtop.agents.row import Row

FINISHED_KEPT: Final = 2000
COMPLETION_GRACE_S: Final = 5.0
"""How long after KV arrived, or P's blocks were freed, the initiator's completion may still be reported."""
_OVER_FOR_ONE_SIDE: Final = frozenset({"received", "released"})
_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
_OTHER: Final[dict[Side, Side]] = {"prefill": "decode", "decode": "prefill"}
RequestKey = tuple[str, Side, str]
"""Engine, its side, and its request id: an engine that computes a prompt may itself read KV for it."""


def base_request_id(request_id: str) -> str:
    """Return a vLLM request id without the random suffix in which P's and D's ids differ.

    From vLLM's `nixl/utils.py:get_base_request_id`, which matches registrations in the same way.

    >>> base_request_id("cmpl-abc-0-1a2b3c4d")
    'cmpl-abc-0'
    """
    return _SUFFIX.sub("", request_id)


def _peer_of(event: TransferEvent) -> RequestKey | None:
    """Return the peer's key where the event names it."""
    if not (event.peer_engine_id and event.peer_request_id):
        return None
    return event.peer_engine_id, _OTHER[event.side], event.peer_request_id


class Tally:
    """What the ledger counts for one engine."""

    __slots__ = ("depths", "done", "failed", "live")

    def __init__(self) -> None:
        self.depths: Counter[str] = Counter()
        self.done = 0
        self.failed: Counter[str] = Counter()
        self.live: dict[int, None] = {}


class Ledger:
    """Joins transfer events into rows, and remembers what changed when."""

    def __init__(
        self,
        *,
        finished_kept: int = FINISHED_KEPT,
        name_of: Callable[[str], str] = lambda engine_id: engine_id,
        attached: Callable[[str], bool] = lambda _engine_id: True,
        completed: Callable[[Row], None] = lambda _row: None,
    ) -> None:
        """Begin empty.

        Args:
            finished_kept: capacity of the ring of finished rows.
            name_of: an engine's name for people, from its engine id.
            attached: whether an engine reports to this agent.
            completed: called once with each row that becomes done.
        """
        self.finished_kept = finished_kept
        self.version = 0
        self.tallies: dict[str, Tally] = {}
        self.total = Tally()
        """Each transfer once, whichever engines take part."""
        self._name_of, self._attached, self._completed = name_of, attached, completed
        self._rows: OrderedDict[int, Row] = OrderedDict()  # in order of change
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._forgotten: deque[tuple[int, int]] = deque(maxlen=4 * finished_kept)
        self._by_request: dict[RequestKey, int] = {}
        self._waiting: dict[tuple[Side, str], int] = {}  # rows that only the other side has reported
        self._overdue: dict[int, int] = {}  # rows that are over for one side, and since when
        self._next_id = 1
        self.complete_since = 0
        """Changes after this version can be told whole; of older ones, ids of forgotten rows are missing."""

    def apply(self, engine_id: str, event: TransferEvent, *, simulated: bool = False) -> None:
        """Take one event that `engine_id` reported about its own request."""
        row = self._find(engine_id, event)
        row.simulated |= simulated
        row.learn(engine_id, event)
        if event.step == "received" and not row.initiator_reports(self._attached):
            row.completed_unseen = True
        row = self._join(row, event)
        self._index(row, engine_id, event)
        self._touch(row)
        if row.live and not row.times_ns.keys().isdisjoint(_OVER_FOR_ONE_SIDE):
            self._overdue.setdefault(row.id, event.at_ns)

    def close_overdue(self, now_ns: int) -> None:
        """Close rows whose end was seen but whose completion was not: the report of it was lost."""
        for row_id, since_ns in list(self._overdue.items()):
            row = self._rows.get(row_id)
            if row is not None and row.live:
                if now_ns - since_ns < COMPLETION_GRACE_S * 1e9:
                    continue
                row.completed_unseen = True
                self._touch(row)
            del self._overdue[row_id]

    def engine_gone(self, engine_id: str, at_ns: int, reason: str) -> None:
        """End the live rows of an engine whose process no longer exists."""
        tally = self.tallies.get(engine_id)
        for row_id in list(tally.live) if tally else ():
            row = self._rows[row_id]
            row.end("failed", at_ns, "transport", reason)
            self._touch(row)

    def rename(self, engine_id: str) -> None:
        """Show the rows of an engine under the name that it has now."""
        for row in [row for row in self._rows.values() if engine_id in row.engines()]:
            self._touch(row)

    def snapshot(self, finished: int) -> list[Transfer]:
        """Return all live rows and at most the newest `finished` others, in order of id."""
        skipped = set(list(self._finished)[: max(0, len(self._finished) - finished)])
        return [self._freeze(row) for row in self._sorted() if row.id not in skipped]

    def changes(self, since: int) -> tuple[list[Transfer], list[int]]:
        """Return the rows that changed after version `since`, and the ids that were forgotten after it.

        `since` must not lie before `complete_since`: who is that far behind needs a snapshot.
        """
        changed: list[Row] = []
        for row in reversed(self._rows.values()):
            if row.version <= since:
                break
            changed.append(row)
        forgotten: list[int] = []
        for version, row_id in reversed(self._forgotten):
            if version <= since:
                break
            forgotten.append(row_id)
        return [self._freeze(row) for row in sorted(changed, key=lambda row: row.id)], forgotten

    def find(self, row_id: int) -> Transfer | None:
        """Return one row; None where there is none of that id, or none any more."""
        row = self._rows.get(row_id)
        return self._freeze(row) if row else None

    def live_of(self, engine_id: str) -> Iterator[Transfer]:
        """Yield the engine's live rows, the one that changed least lately first."""
        tally = self.tallies.get(engine_id)
        for row_id in list(tally.live) if tally else ():
            yield self._freeze(self._rows[row_id])

    def awaits_prefill(self, row_id: int) -> bool:
        """Whether P, which reports here and whose answer decides the direction, has not said anything yet."""
        row = self._rows.get(row_id)
        prefill = row.engine("prefill") if row else None
        return bool(row and prefill and self._attached(prefill) and row.reported_by("prefill") is None)

    def live_ids(self) -> list[int]:
        """Return the ids of all live rows, the newest last."""
        return sorted(self.total.live)

    def latest_of(self, engine_id: str) -> Transfer | None:
        """Return the engine's newest row whose direction is known."""
        found = (row for row in self._rows.values() if engine_id in row.engines())
        for row in sorted(found, key=lambda row: -row.id):
            if (transfer := self._freeze(row)).direction is not None:
                return transfer
        return None

    def _sorted(self) -> Iterator[Row]:
        yield from sorted(self._rows.values(), key=lambda row: row.id)

    def oldest_live_ns(self, engine_id: str) -> int | None:
        """Return when the engine's oldest live row was first seen."""
        tally = self.tallies.get(engine_id)
        live = tally.live if tally else ()
        return min((self._rows[row_id].first_seen_ns for row_id in live), default=None)

    def _find(self, engine_id: str, event: TransferEvent) -> Row:
        """Return the row that an event belongs to, making one if there is none."""
        known = self._by_request.get((engine_id, event.side, event.request_id))
        if known is None and (peer := _peer_of(event)):
            known = self._by_request.get(peer)
        if known is None:
            known = self._waiting.get((event.side, base_request_id(event.request_id)))
        if known is not None and self._rows[known].may_be(event.side, engine_id, event.request_id):
            return self._rows[known]
        row = Row(self._next_id)
        self._next_id += 1
        self._rows[row.id] = row
        return row

    def _join(self, row: Row, event: TransferEvent) -> Row:
        """Merge the peer's row into this one where an event names a peer that has a row of its own."""
        peer = _peer_of(event)
        other_id = self._by_request.get(peer, row.id) if peer else row.id
        if other_id == row.id:
            return row
        older, younger = sorted((row, self._rows[other_id]), key=lambda each: each.id)
        self._untally(younger)
        older.absorb(younger)
        del self._rows[younger.id]
        self._finished.pop(younger.id, None)
        self._forget(younger.id)
        for key in younger.keys:
            self._by_request[key] = older.id
        for waited in younger.waits_for | older.waits_for:
            if self._waiting.get(waited) in (older.id, younger.id):
                del self._waiting[waited]
        return older

    def _index(self, row: Row, engine_id: str, event: TransferEvent) -> None:
        key: RequestKey = (engine_id, event.side, event.request_id)
        self._by_request[key] = row.id
        row.keys.add(key)
        if peer := _peer_of(event):
            row.keys.add(peer)
            self._by_request.setdefault(peer, row.id)
        base = base_request_id(event.request_id)
        self._waiting.pop((event.side, base), None)
        other = _OTHER[event.side]
        if row.reported_by(other) is None:
            self._waiting[(other, base)] = row.id
            row.waits_for.add((other, base))

    def _touch(self, row: Row) -> None:
        """Bring counters, the ring and the order of change up to date with a row that changed."""
        self._untally(row)
        row.settle()
        self._tally(row)
        self.version += 1
        row.version = self.version
        row.frozen = None
        self._rows.move_to_end(row.id)
        if row.live:
            self._finished.pop(row.id, None)
            return
        if row.stage == "done" and not row.announced:
            row.announced = True
            self._completed(row)
        self._finished[row.id] = None
        while len(self._finished) > self.finished_kept:
            self._drop(next(iter(self._finished)))

    def _drop(self, row_id: int) -> None:
        """Forget a finished row, its keys included; the engines' counts stay."""
        row = self._rows.pop(row_id)
        del self._finished[row_id]
        for key in row.keys:
            if self._by_request.get(key) == row_id:
                del self._by_request[key]
        for waited in row.waits_for:
            if self._waiting.get(waited) == row_id:
                del self._waiting[waited]
        self._forget(row_id)

    def _forget(self, row_id: int) -> None:
        self.version += 1
        if len(self._forgotten) == self._forgotten.maxlen:
            self.complete_since = self._forgotten[0][0]
        self._forgotten.append((self.version, row_id))

    def _tally(self, row: Row) -> None:
        row.tallied = (row.stage, row.error_class, row.engines())
        self._count(row, 1)

    def _untally(self, row: Row) -> None:
        self._count(row, -1)
        row.tallied = None

    def _count(self, row: Row, sign: int) -> None:
        if row.tallied is None:
            return
        stage, error_class, engines = row.tallied
        for tally in (self.total, *(self.tallies.setdefault(each, Tally()) for each in engines)):
            if row.live_stage(stage):
                tally.depths[stage] += sign
                if sign > 0:
                    tally.live[row.id] = None
                else:
                    tally.live.pop(row.id, None)
            elif stage == "done":
                tally.done += sign
            else:
                tally.failed[error_class or "other"] += sign

    def _freeze(self, row: Row) -> Transfer:
        if row.frozen is None:
            row.frozen = row.freeze(self._name_of)
        return row.frozen
