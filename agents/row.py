"""One transfer's facts, and the stage that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeGuard

from kvtop.agents.events import Direction, ErrorClass, Mark, Side, Stage, TransferEvent
from kvtop.agents.model import LIVE_STAGES, Endpoint, Transfer

ENDS: Final[tuple[Stage, ...]] = ("quarantined", "failed", "expired", "cancelled")
"""Ends other than `done`, the winner first: a transfer that failed in any way is never shown as done."""

OTHER: Final[dict[Side, Side]] = {"prefill": "decode", "decode": "prefill"}
RequestKey = tuple[str, Side, str]
"""Engine, its side, and its request id: an engine that computes a prompt may itself read KV for it."""
MAX_TOTAL: Final = (1 << 63) - 1
_TELLING: Final = frozenset({"registered", "matched", "handshaking", "posting", "on_wire", "done"})
"""Steps of the transfer itself; at others a side tells a direction that it expects, and that may not come."""
_LIVE: Final = frozenset(LIVE_STAGES)
_LATEST_FIRST: Final = LIVE_STAGES[::-1]
_INITIATOR: Final[dict[Direction, Side]] = {"push": "prefill", "pull": "decode"}


def is_end(step: Stage | Mark) -> TypeGuard[Stage]:
    """Whether a step ends a transfer without success."""
    return step in ENDS


class _RankDone(NamedTuple):
    at_ns: int
    bytes: int | None
    descriptors: int | None
    post_us: float | None
    wire_us: float | None


class Party(NamedTuple):
    """One side of a transfer, as far as known."""

    engine_id: str
    request_id: str | None
    reported: bool
    """Whether this side itself has reported; else it is what the other side says of it."""


class Row:
    """Facts in order of nothing: learning them in any order gives the same row.

    There may be 100,000 of them: what few rows need is made when it is needed.
    """

    __slots__ = (
        "_blocks_of_d",
        "_blocks_of_p",
        "_direction",
        "_direction_shown",
        "_errors",
        "_lease_deadline_ns",
        "_ranks",
        "_ranks_expected",
        "announced",
        "completed_unseen",
        "decode",
        "first_seen_ns",
        "id",
        "keys",
        "prefill",
        "simulated",
        "stage",
        "tallied",
        "times_ns",
        "version",
    )

    def __init__(self, row_id: int) -> None:
        """Begin a row of which nothing is known."""
        self.id = row_id
        self.version = 0
        self.tallied: tuple[Stage, ErrorClass | None, tuple[str, ...]] | None = None
        self.announced = False
        self.simulated = False
        self.completed_unseen = False
        self.keys: list[RequestKey] = []
        self.stage: Stage = "queued"
        self.times_ns: dict[Stage | Mark, int] = {}
        self.first_seen_ns = MAX_TOTAL
        """When the first of the known steps was reported."""
        self.prefill: Party | None = None
        self.decode: Party | None = None
        self._direction: Direction | None = None
        self._direction_shown = False
        """Whether a step of the transfer itself told the direction."""
        self._blocks_of_p: int | None = None
        self._blocks_of_d: int | None = None
        self._lease_deadline_ns: int | None = None
        self._ranks_expected: int | None = None
        self._ranks: dict[int, _RankDone] | None = None
        self._errors: dict[Stage, tuple[int, ErrorClass, str | None]] | None = None

    @property
    def live(self) -> bool:
        """Whether the transfer is still under way."""
        return self.stage in _LIVE

    @staticmethod
    def live_stage(stage: Stage) -> bool:
        """Whether a stage is one of a transfer under way."""
        return stage in _LIVE

    @property
    def bytes(self) -> int | None:
        """Payload bytes over all ranks that are done; None while unknown."""
        return _summed(self._ranks).bytes

    @property
    def error_class(self) -> ErrorClass | None:
        """Why the transfer ended without success, None if it did not."""
        known = self._reason()
        return known[1] if known else None

    def _reason(self) -> tuple[int, ErrorClass, str | None] | None:
        """Return when and why the transfer ended: what a quarantine follows from has the reason."""
        if self._errors is None:
            return None
        known = self._errors.get(self.stage)
        if self.stage == "quarantined" and (known is None or known[1] == "other"):
            return next((self._errors[stage] for stage in ENDS[1:] if stage in self._errors), known)
        return known

    def party(self, side: Side) -> Party | None:
        """Return what is known of one side."""
        return self.prefill if side == "prefill" else self.decode

    def _set_party(self, side: Side, party: Party) -> None:
        if side == "prefill":
            self.prefill = party
        else:
            self.decode = party

    def engines(self) -> tuple[str, ...]:
        """Return the engine ids of both sides, as far as known, P's first."""
        if self.prefill is None:
            return (self.decode.engine_id,) if self.decode else ()
        if self.decode is None or self.decode.engine_id == self.prefill.engine_id:
            return (self.prefill.engine_id,)
        return self.prefill.engine_id, self.decode.engine_id

    def engine(self, side: Side) -> str | None:
        """Return one side's engine id."""
        party = self.party(side)
        return party.engine_id if party else None

    def may_be(self, side: Side, engine_id: str, request_id: str) -> bool:
        """Whether a side that reports under these ids can be this row's: no engine hands over to itself."""
        if self.engine(OTHER[side]) == engine_id:
            return False
        if self.engine(side) not in (None, engine_id):
            return False
        return self.reported_by(side) in (None, request_id)

    def reported_by(self, side: Side) -> str | None:
        """Return the request id under which a side itself has reported, None if it has not."""
        party = self.party(side)
        return party.request_id if party and party.reported else None

    def reports(self) -> Iterator[tuple[Side, str]]:
        """Yield each side that has reported itself, and its request id."""
        sides: tuple[Side, ...] = ("prefill", "decode")
        for side in sides:
            if request_id := self.reported_by(side):
                yield side, request_id

    def initiator_reports(self, attached: Callable[[str], bool]) -> bool:
        """Whether the side that posts the transfer may report here, and so will say when it is done."""
        party = self.party(_INITIATOR[self._direction or "push"])
        return party is None or party.reported or attached(party.engine_id)

    def meet(self, side: Side, engine_id: str, request_id: str) -> None:
        """Learn that a side reports under these ids."""
        self._set_party(side, Party(engine_id, request_id, reported=True))

    def hear_of(self, side: Side, engine_id: str, request_id: str | None) -> None:
        """Learn what the other side says of a side; what that side says of itself stands above it."""
        known = self.party(side)
        if known is None or not (known.reported or known == (engine_id, request_id, False)):
            self._set_party(side, Party(engine_id, request_id, reported=False))

    def learn(self, event: TransferEvent) -> None:
        """Take the facts of one event, but for who the two sides are."""
        step, at_ns = event.step, event.at_ns
        if event.direction is not None:
            self._learn_direction(event.direction, shown=step in _TELLING)
        if event.blocks is not None:
            if event.side == "prefill":
                self._blocks_of_p = event.blocks
            else:
                self._blocks_of_d = event.blocks
        if event.lease_deadline_ns is not None:
            self._lease_deadline_ns = _latest(self._lease_deadline_ns, event.lease_deadline_ns)
        if event.ranks_expected is not None:
            self._ranks_expected = _latest(self._ranks_expected, event.ranks_expected)
        if step == "done":
            if self._ranks is None:
                self._ranks = {}
            self._ranks.setdefault(
                event.rank, _RankDone(at_ns, event.bytes, event.descriptors, event.post_us, event.wire_us)
            )
            self.first_seen_ns = min(self.first_seen_ns, at_ns)
        elif is_end(step):
            self.end(step, at_ns, event.error_class or "other", event.error)
        else:
            self._first(step, at_ns)

    def _learn_direction(self, direction: Direction | None, *, shown: bool) -> None:
        """Take a direction, unless a better witness has told another."""
        if direction is None or (self._direction is not None and self._direction_shown and not shown):
            return
        self._direction, self._direction_shown = direction, shown or self._direction_shown

    def end(self, stage: Stage, at_ns: int, error_class: ErrorClass, error: str | None) -> None:
        """Learn that the transfer ended without success; of several reasons the best known one stays."""
        self._first(stage, at_ns)
        if self._errors is None:
            self._errors = {}
        known = self._errors.get(stage)
        if known is None or (error_class != "other", -at_ns) > (known[1] != "other", -known[0]):
            self._errors[stage] = (at_ns, error_class, error)

    def absorb(self, other: Row) -> None:
        """Take all facts of another row about the same transfer."""
        sides: tuple[Side, ...] = ("prefill", "decode")
        for side in sides:
            known, told = self.party(side), other.party(side)
            if told and (known is None or not known.reported):
                self._set_party(side, told)
        self._learn_direction(other._direction, shown=other._direction_shown)
        self._blocks_of_p = other._blocks_of_p if self._blocks_of_p is None else self._blocks_of_p
        self._blocks_of_d = other._blocks_of_d if self._blocks_of_d is None else self._blocks_of_d
        self._lease_deadline_ns = _latest(self._lease_deadline_ns, other._lease_deadline_ns)
        self._ranks_expected = _latest(self._ranks_expected, other._ranks_expected)
        if other._ranks:
            self._ranks = {**other._ranks, **(self._ranks or {})}
        for stage, (at_ns, error_class, error) in (other._errors or {}).items():
            self.end(stage, at_ns, error_class, error)
        for step, at_ns in other.times_ns.items():
            self._first(step, at_ns)
        self.keys += [key for key in other.keys if key not in self.keys]
        self.simulated |= other.simulated
        self.announced |= other.announced
        self.completed_unseen &= other.completed_unseen

    def settle(self) -> None:
        """Derive the stage from the facts."""
        times_ns = self.times_ns
        expected = max(1, self._ranks_expected or 1)  # an engine may report anything
        if self._ranks and len(self._ranks) >= expected:
            times_ns["done"] = _summed(self._ranks).at_ns
        elif self.completed_unseen or "skipped" in times_ns:
            marks: tuple[Mark, ...] = ("received", "skipped", "released")
            times_ns["done"] = next(times_ns[mark] for mark in marks if mark in times_ns)
        elif "done" in times_ns:
            del times_ns["done"]
        if self._errors:
            for stage in ENDS:
                if stage in times_ns and not self._over(stage):
                    self.stage = stage
                    return
        if "done" in times_ns:
            self.stage = "done"
            return
        for stage in _LATEST_FIRST:
            if stage in times_ns:
                self.stage = stage
                return
        self.stage = "queued"

    def _over(self, stage: Stage) -> bool:
        """Whether a stage does not tell the outcome any more: a quarantine ends when it is settled."""
        return stage == "quarantined" and "settled" in self.times_ns

    def over_for_one_side_ns(self) -> int | None:
        """Return since when the KV has arrived or P's blocks are free, None while neither is so."""
        received_ns, released_ns = self.times_ns.get("received"), self.times_ns.get("released")
        if received_ns is None or released_ns is None:
            return released_ns if received_ns is None else received_ns
        return min(received_ns, released_ns)

    def freeze(self, name_of: Callable[[str], str]) -> Transfer:
        """Return the row as a value for consoles."""
        error = self._reason()
        moved = _summed(self._ranks)
        times_ns = self.times_ns
        return Transfer(
            id=self.id,
            direction=self._direction,
            stage=self.stage,
            stage_since_ns=times_ns.get(self.stage, self.first_seen_ns),
            first_seen_ns=self.first_seen_ns,
            prefill=_endpoint(self.prefill, name_of),
            decode=_endpoint(self.decode, name_of),
            times_ns={step: times_ns[step] for step in sorted(times_ns, key=times_ns.__getitem__)},
            blocks=self._blocks_of_d if self._blocks_of_p is None else self._blocks_of_p,
            bytes=moved.bytes,
            descriptors=moved.descriptors,
            post_us=moved.post_us,
            wire_us=moved.wire_us,
            ranks_done=len(self._ranks) if self._ranks else 0,
            ranks_expected=self._ranks_expected,
            lease_deadline_ns=self._lease_deadline_ns,
            error_class=error[1] if error else None,
            error=error[2] if error else None,
            simulated=self.simulated,
        )

    def _first(self, step: Stage | Mark, at_ns: int) -> None:
        known = self.times_ns.get(step)
        if known is None or at_ns < known:
            self.times_ns[step] = at_ns
            self.first_seen_ns = min(self.first_seen_ns, at_ns)


def _endpoint(party: Party | None, name_of: Callable[[str], str]) -> Endpoint | None:
    return party and Endpoint(party.engine_id, name_of(party.engine_id), party.request_id)


_NOTHING: Final = _RankDone(0, None, None, None, None)


def _summed(ranks: dict[int, _RankDone] | None) -> _RankDone:
    """Return what all ranks moved together, and the slowest one's durations."""
    if not ranks:
        return _NOTHING
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    done = ranks.values()
    return _RankDone(
        max(rank.at_ns for rank in done),
        _total(rank.bytes for rank in done),
        _total(rank.descriptors for rank in done),
        _slowest(rank.post_us for rank in done),
        _slowest(rank.wire_us for rank in done),
    )


def _latest(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else max(known, new)


def _slowest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of what is known, held within what the wire can carry whatever an engine reported."""
    known = [value for value in values if value is not None]
    return max(-MAX_TOTAL, min(MAX_TOTAL, sum(known))) if known else None
