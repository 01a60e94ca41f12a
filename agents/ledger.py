"""The transfer ledger: every KV transfer as one row that joins what P and D report.

A row is a set of facts, and its stage is derived from them, so that the order in which the two sides' reports
arrive does not matter. Live rows are all kept; finished ones in a bounded ring.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvtop.agents.events import Side, TransferEvent
from kvtop.agents.model import Transfer
from kvtop.agents.row import OTHER, Party, RequestKey, Row

FINISHED_KEPT: Final = 2000
COMPLETION_GRACE_S: Final = 5.0
"""How long after KV arrived, or P's blocks were freed, the initiator's completion may still be reported."""
MOST_ASIDE: Final = 4096
"""How many events wait at most until they are taken."""
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z", re.IGNORECASE)
_SUFFIX_LENGTH: Final = 9


def base_request_id(request_id: str) -> str:
    """Return a vLLM request id without the random suffix in which P's and D's ids differ.

    From vLLM's `nixl/utils.py:get_base_request_id`, which matches registrations in the same way.

    >>> base_request_id("cmpl-abc-0-1a2b3c4d")
    'cmpl-abc-0'
    """
    at = len(request_id) - _SUFFIX_LENGTH
    return request_id[:at] if at >= 0 and _SUFFIX.match(request_id, at) else request_id


class Tally:
    """What the ledger counts for one engine."""

    __slots__ = ("depths", "done", "failed", "live")

    def __init__(self) -> None:
        self.depths: Counter[str] = Counter()
        self.done = 0
        self.failed: Counter[str] = Counter()
        self.live: dict[int, Row] = {}


class Ledger:
    """Joins transfer events into rows, and remembers what changed when.

    Events are put aside as they come, and taken in their order when somebody asks or when they are many:
    a row is brought up to date once for all that has happened to it since.
    """

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
        self._version = 0
        self._tallies: dict[str, Tally] = {}
        self._total = Tally()
        self._name_of, self._attached, self._completed = name_of, attached, completed
        self._rows: dict[int, Row] = {}  # in order of change
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._forgotten: deque[tuple[int, int]] = deque(maxlen=4 * finished_kept)
        self._by_request: dict[RequestKey, Row] = {}
        self._waiting: dict[tuple[Side, str], Row] = {}  # rows that only the other side has reported
        self._overdue: dict[int, int] = {}  # rows that are over for one side, and since when
        self._aside: list[tuple[str, TransferEvent, bool]] = []
        self._next_id = 1
        self._complete_since = 0

    @property
    def version(self) -> int:
        """Grows with each change."""
        self._catch_up()
        return self._version

    @property
    def complete_since(self) -> int:
        """Changes after this version can be told whole; of older ones, ids of forgotten rows are missing."""
        self._catch_up()
        return self._complete_since

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """What is counted for each engine, by its id."""
        self._catch_up()
        return self._tallies

    @property
    def total(self) -> Tally:
        """Each transfer once, whichever engines take part."""
        self._catch_up()
        return self._total

    def apply(self, engine_id: str, event: TransferEvent, *, simulated: bool = False) -> None:
        """Take one event that `engine_id` reported about its own request."""
        self._aside.append((engine_id, event, simulated))
        if len(self._aside) >= MOST_ASIDE:
            self._catch_up()

    def _catch_up(self) -> None:
        """Take the events that were put aside."""
        if not self._aside:
            return
        events, self._aside = self._aside, []
        changed: dict[int, Row] = {}
        for engine_id, event, simulated in events:
            own = Party(engine_id, event.request_id, reported=True)
            row = self._by_request.get((engine_id, event.side, event.request_id))
            if row is None or row.party(event.side) != own:
                row = self._meet(row, engine_id, event)
                row.simulated |= simulated
            if event.peer_engine_id:
                row = self._hear_of_peer(row, event, event.peer_engine_id, changed)
            row.learn(event)
            if event.step == "received" and not row.initiator_reports(self._attached):
                row.completed_unseen = True
            changed[row.id] = row
        for row in changed.values():
            self._touch(row)

    def close_overdue(self, now_ns: int) -> None:
        """Close rows whose end was seen but whose completion was not: the report of it was lost."""
        self._catch_up()
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
        for row in self._live_rows(engine_id):
            row.end("failed", at_ns, "transport", reason)
            self._touch(row)

    def rename(self, engine_id: str) -> None:
        """Show the rows of an engine under the name that it has now."""
        self._catch_up()
        for row in [row for row in self._rows.values() if engine_id in row.engines()]:
            self._touch(row)

    def snapshot(self, finished: int) -> list[Transfer]:
        """Return all live rows and at most the newest `finished` others, in order of id."""
        self._catch_up()
        skipped = set(list(self._finished)[: max(0, len(self._finished) - finished)])
        return [self._freeze(row) for row in self._sorted() if row.id not in skipped]

    def changes(self, since: int) -> tuple[list[Transfer], list[int]]:
        """Return the rows that changed after version `since`, and the ids that were forgotten after it.

        `since` must not lie before `complete_since`: who is that far behind needs a snapshot.
        """
        self._catch_up()
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
        return [self._freeze(row) for row in sorted(changed, key=_row_id)], forgotten

    def find(self, row_id: int) -> Transfer | None:
        """Return one row; None where there is none of that id, or none any more."""
        self._catch_up()
        row = self._rows.get(row_id)
        return self._freeze(row) if row else None

    def live_of(self, engine_id: str) -> Iterator[Transfer]:
        """Yield the engine's live rows, the one that changed least lately first."""
        yield from map(self._freeze, self._live_rows(engine_id))

    def _live_rows(self, engine_id: str) -> list[Row]:
        tally = self.tallies.get(engine_id)
        return list(tally.live.values()) if tally else []

    def awaits_prefill(self, row_id: int) -> bool:
        """Whether P, which reports here and whose answer decides the direction, has not said anything yet."""
        self._catch_up()
        row = self._rows.get(row_id)
        prefill = row.engine("prefill") if row else None
        return bool(row and prefill and self._attached(prefill) and row.reported_by("prefill") is None)

    def live_ids(self) -> list[int]:
        """Return the ids of all live rows, the newest last."""
        return sorted(self.total.live)

    def latest_of(self, engine_id: str) -> Transfer | None:
        """Return the engine's newest row whose direction is known."""
        self._catch_up()
        found = (row for row in self._rows.values() if engine_id in row.engines())
        for row in sorted(found, key=_row_id, reverse=True):
            if (transfer := self._freeze(row)).direction is not None:
                return transfer
        return None

    def _sorted(self) -> Iterator[Row]:
        yield from sorted(self._rows.values(), key=_row_id)

    def oldest_live_ns(self, engine_id: str) -> int | None:
        """Return when the engine's oldest live row was first seen."""
        return min((row.first_seen_ns for row in self._live_rows(engine_id)), default=None)

    def _meet(self, named: Row | None, engine_id: str, event: TransferEvent) -> Row:
        """Return the row to which a side belongs that has not reported yet, making one if there is none.

        `named` is the row whose peer is called so, if there is one.
        """
        side, request_id = event.side, event.request_id
        waited = side, base_request_id(request_id)
        row = named
        if row is None and event.peer_engine_id and event.peer_request_id:
            row = self._by_request.get((event.peer_engine_id, OTHER[side], event.peer_request_id))
        if row is None:
            row = self._waiting.get(waited)
        if row is None or not row.may_be(side, engine_id, request_id):
            row = Row(self._next_id)
            self._next_id += 1
            self._rows[row.id] = row
        row.meet(side, engine_id, request_id)
        key: RequestKey = (engine_id, side, request_id)
        self._name(row, key)
        self._by_request[key] = row
        self._waiting.pop(waited, None)
        self._await_other(row)
        return row

    def _hear_of_peer(
        self, row: Row, event: TransferEvent, peer_engine_id: str, changed: dict[int, Row]
    ) -> Row:
        """Note whom an event names as its peer; return the row, merged if the peer has its own."""
        other = OTHER[event.side]
        row.hear_of(other, peer_engine_id, event.peer_request_id)
        if not event.peer_request_id:
            return row
        key: RequestKey = (peer_engine_id, other, event.peer_request_id)
        theirs = self._by_request.get(key)
        if theirs is None:
            self._name(row, key)
            self._by_request[key] = row
            return row
        if theirs is row:
            return row
        older, younger = (row, theirs) if row.id < theirs.id else (theirs, row)
        changed.pop(younger.id, None)
        self._merge(older, younger)
        return older

    @staticmethod
    def _name(row: Row, key: RequestKey) -> None:
        if key not in row.keys:
            row.keys.append(key)

    def _merge(self, older: Row, younger: Row) -> None:
        """Take all that is known of one row over into another."""
        self._untally(younger)
        self._stop_waiting(older, younger)
        older.absorb(younger)
        del self._rows[younger.id]
        self._finished.pop(younger.id, None)
        self._forget(younger.id)
        for key in younger.keys:
            self._by_request[key] = older
        self._await_other(older)

    def _await_other(self, row: Row) -> None:
        """Have a side that has not reported find the row by the base of the other's request id."""
        for side, request_id in row.reports():
            if row.reported_by(OTHER[side]) is None:
                self._waiting[OTHER[side], base_request_id(request_id)] = row

    def _stop_waiting(self, *rows: Row) -> None:
        for row in rows:
            for side, request_id in row.reports():
                waited = OTHER[side], base_request_id(request_id)
                if self._waiting.get(waited) in rows:
                    del self._waiting[waited]

    def _touch(self, row: Row) -> None:
        """Bring counters, the ring and the order of change up to date with a row that changed."""
        row.settle()
        self._tally(row)
        self._version += 1
        row.version = self._version
        del self._rows[row.id]
        self._rows[row.id] = row
        if row.live:
            self._finished.pop(row.id, None)
            over_ns = row.over_for_one_side_ns()
            if over_ns is not None:
                self._overdue.setdefault(row.id, over_ns)
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
            if self._by_request.get(key) is row:
                del self._by_request[key]
        self._stop_waiting(row)
        self._forget(row_id)

    def _forget(self, row_id: int) -> None:
        self._version += 1
        if len(self._forgotten) == self._forgotten.maxlen:
            self._complete_since = self._forgotten[0][0]
        self._forgotten.append((self._version, row_id))

    def _tally(self, row: Row) -> None:
        """Count a row as what it is now."""
        now = (row.stage, row.error_class, row.engines())
        if now != row.tallied:
            self._untally(row)
            row.tallied = now
            self._count(row, 1)

    def _untally(self, row: Row) -> None:
        if row.tallied is not None:
            self._count(row, -1)
            row.tallied = None

    def _count(self, row: Row, sign: int) -> None:
        assert row.tallied is not None
        stage, error_class, engines = row.tallied
        for tally in (self._total, *map(self._tally_of, engines)):
            if row.live_stage(stage):
                tally.depths[stage] += sign
                if sign > 0:
                    tally.live[row.id] = row
                else:
                    del tally.live[row.id]
            elif stage == "done":
                tally.done += sign
            else:
                tally.failed[error_class or "other"] += sign

    def _tally_of(self, engine_id: str) -> Tally:
        tally = self._tallies.get(engine_id)
        if tally is None:
            tally = self._tallies[engine_id] = Tally()
        return tally

    def _freeze(self, row: Row) -> Transfer:
        return row.freeze(self._name_of)


def _row_id(row: Row) -> int:
    return row.id
