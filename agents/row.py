"""One transfer's facts, and the stage that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeGuard

from kvtop.agents.events import Direction, ErrorClass, Mark, Side, Stage, TransferEvent
from kvtop.agents.model import LIVE_STAGES, Endpoint, Transfer

ENDS: Final[tuple[Stage, ...]] = ("quarantined", "failed", "expired", "cancelled")
"""Ends other than `done`, the winner first: a transfer that failed in any way is never shown as done."""

_TELLING: Final = frozenset({"registered", "matched", "handshaking", "posting", "on_wire", "done"})
"""Steps of the transfer itself; at others a side tells a direction that it expects, and that may not come."""
MAX_TOTAL: Final = (1 << 63) - 1
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


class _Party(NamedTuple):
    engine_id: str
    request_id: str | None
    reported: bool
    """Whether this side itself has reported; else it is what the other side says of it."""


class Row:
    """Facts in order of nothing: learning them in any order gives the same row."""

    def __init__(self, row_id: int) -> None:
        """Begin a row of which nothing is known."""
        self.id = row_id
        self.version = 0
        self.frozen: Transfer | None = None
        self.tallied: tuple[Stage, ErrorClass | None, tuple[str, ...]] | None = None
        self.announced = False
        self.simulated = False
        self.completed_unseen = False
        self.keys: set[tuple[str, Side, str]] = set()
        self.waits_for: set[tuple[Side, str]] = set()
        self.stage: Stage = "queued"
        self.times_ns: dict[Stage | Mark, int] = {}
        self._parties: dict[Side, _Party] = {}
        self._direction: Direction | None = None
        self._direction_shown = False
        """Whether a step of the transfer itself told the direction."""
        self._blocks: dict[Side, int] = {}
        self._lease_deadline_ns: int | None = None
        self._ranks_expected: int | None = None
        self._ranks: dict[int, _RankDone] = {}
        self._errors: dict[Stage, tuple[int, ErrorClass, str | None]] = {}

    @property
    def live(self) -> bool:
        """Whether the transfer is still under way."""
        return self.live_stage(self.stage)

    @staticmethod
    def live_stage(stage: Stage) -> bool:
        """Whether a stage is one of a transfer under way."""
        return stage in LIVE_STAGES

    @property
    def first_seen_ns(self) -> int:
        """When the first of the known steps was reported."""
        return min(self.times_ns.values(), default=0)

    @property
    def bytes(self) -> int | None:
        """Payload bytes over all ranks that are done; None while unknown."""
        return _total(rank.bytes for rank in self._ranks.values())

    @property
    def error_class(self) -> ErrorClass | None:
        """Why the transfer ended without success, None if it did not."""
        known = self._reason()
        return known[1] if known else None

    def _reason(self) -> tuple[int, ErrorClass, str | None] | None:
        """Return when and why the transfer ended: what a quarantine follows from has the reason."""
        known = self._errors.get(self.stage)
        if self.stage == "quarantined" and (known is None or known[1] == "other"):
            return next((self._errors[stage] for stage in ENDS[1:] if stage in self._errors), known)
        return known

    def engines(self) -> tuple[str, ...]:
        """Return the engine ids of both sides, as far as known."""
        return tuple(sorted({party.engine_id for party in self._parties.values()}))

    def engine(self, side: Side) -> str | None:
        """Return one side's engine id."""
        party = self._parties.get(side)
        return party.engine_id if party else None

    def may_be(self, side: Side, engine_id: str, request_id: str) -> bool:
        """Whether a side that reports under these ids can be this row's: no engine hands over to itself."""
        if self.engine("decode" if side == "prefill" else "prefill") == engine_id:
            return False
        if self.engine(side) not in (None, engine_id):
            return False
        return self.reported_by(side) in (None, request_id)

    def reported_by(self, side: Side) -> str | None:
        """Return the request id under which a side itself has reported, None if it has not."""
        party = self._parties.get(side)
        return party.request_id if party and party.reported else None

    def initiator_reports(self, attached: Callable[[str], bool]) -> bool:
        """Whether the side that posts the transfer may report here, and so will say when it is done."""
        initiator = _INITIATOR[self._direction or "push"]
        party = self._parties.get(initiator)
        return party is None or party.reported or attached(party.engine_id)

    def learn(self, engine_id: str, event: TransferEvent) -> None:
        """Take the facts of one event."""
        self._parties[event.side] = _Party(engine_id, event.request_id, True)
        if event.peer_engine_id:
            other: Side = "decode" if event.side == "prefill" else "prefill"
            known = self._parties.get(other)
            if known is None or not known.reported:
                self._parties[other] = _Party(event.peer_engine_id, event.peer_request_id, False)
        self._learn_direction(event.direction, shown=event.step in _TELLING)
        if event.blocks is not None:
            self._blocks[event.side] = event.blocks
        self._lease_deadline_ns = _latest(self._lease_deadline_ns, event.lease_deadline_ns)
        self._ranks_expected = _latest(self._ranks_expected, event.ranks_expected)
        if event.step == "done":
            self._ranks.setdefault(
                event.rank,
                _RankDone(event.at_ns, event.bytes, event.descriptors, event.post_us, event.wire_us),
            )
        elif is_end(event.step):
            self.end(event.step, event.at_ns, event.error_class or "other", event.error)
        else:
            self._first(event.step, event.at_ns)

    def _learn_direction(self, direction: Direction | None, *, shown: bool) -> None:
        """Take a direction, unless a better witness has told another."""
        if direction is None or (self._direction is not None and self._direction_shown and not shown):
            return
        self._direction, self._direction_shown = direction, shown or self._direction_shown

    def end(self, stage: Stage, at_ns: int, error_class: ErrorClass, error: str | None) -> None:
        """Learn that the transfer ended without success; of several reasons the best known one stays."""
        self._first(stage, at_ns)
        known = self._errors.get(stage)
        if known is None or (error_class != "other", -at_ns) > (known[1] != "other", -known[0]):
            self._errors[stage] = (at_ns, error_class, error)

    def absorb(self, other: Row) -> None:
        """Take all facts of another row about the same transfer."""
        for side, party in other._parties.items():
            known = self._parties.get(side)
            if known is None or not known.reported:
                self._parties[side] = party
        self._learn_direction(other._direction, shown=other._direction_shown)
        self._blocks = {**other._blocks, **self._blocks}
        self._lease_deadline_ns = _latest(self._lease_deadline_ns, other._lease_deadline_ns)
        self._ranks_expected = _latest(self._ranks_expected, other._ranks_expected)
        self._ranks = {**other._ranks, **self._ranks}
        for stage, (at_ns, error_class, error) in other._errors.items():
            self.end(stage, at_ns, error_class, error)
        for step, at_ns in other.times_ns.items():
            self._first(step, at_ns)
        self.keys |= other.keys
        self.waits_for |= other.waits_for
        self.simulated |= other.simulated
        self.announced |= other.announced
        self.completed_unseen &= other.completed_unseen

    def settle(self) -> None:
        """Derive the stage from the facts."""
        expected = max(1, self._ranks_expected or 1)  # an engine may report anything
        if len(self._ranks) >= expected:
            self.times_ns["done"] = max(rank.at_ns for rank in self._ranks.values())
        elif self.completed_unseen or "skipped" in self.times_ns:
            marks: tuple[Mark, ...] = ("received", "skipped", "released")
            self.times_ns["done"] = next(self.times_ns[mark] for mark in marks if mark in self.times_ns)
        else:
            self.times_ns.pop("done", None)
        ended = next((stage for stage in ENDS if stage in self.times_ns and not self._over(stage)), None)
        first: Stage = "queued"
        reached = next((stage for stage in reversed(LIVE_STAGES) if stage in self.times_ns), first)
        self.stage = ended or ("done" if "done" in self.times_ns else reached)

    def _over(self, stage: Stage) -> bool:
        """Whether a stage does not tell the outcome any more: a quarantine ends when it is settled."""
        return stage == "quarantined" and "settled" in self.times_ns

    def freeze(self, name_of: Callable[[str], str]) -> Transfer:
        """Return the row as a value for consoles."""
        error = self._reason()
        ranks = self._ranks.values()
        return Transfer(
            id=self.id,
            direction=self._direction,
            stage=self.stage,
            stage_since_ns=self.times_ns.get(self.stage, self.first_seen_ns),
            first_seen_ns=self.first_seen_ns,
            prefill=self._endpoint("prefill", name_of),
            decode=self._endpoint("decode", name_of),
            times_ns=dict(sorted(self.times_ns.items(), key=lambda item: item[1])),
            blocks=self._blocks.get("prefill", self._blocks.get("decode")),
            bytes=self.bytes,
            descriptors=_total(rank.descriptors for rank in ranks),
            post_us=max((rank.post_us for rank in ranks if rank.post_us is not None), default=None),
            wire_us=max((rank.wire_us for rank in ranks if rank.wire_us is not None), default=None),
            ranks_done=len(ranks),
            ranks_expected=self._ranks_expected,
            lease_deadline_ns=self._lease_deadline_ns,
            error_class=error[1] if error else None,
            error=error[2] if error else None,
            simulated=self.simulated,
        )

    def _endpoint(self, side: Side, name_of: Callable[[str], str]) -> Endpoint | None:
        party = self._parties.get(side)
        return party and Endpoint(party.engine_id, name_of(party.engine_id), party.request_id)

    def _first(self, step: Stage | Mark, at_ns: int) -> None:
        self.times_ns[step] = min(at_ns, self.times_ns.get(step, at_ns))


def _latest(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else max(known, new)


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of what is known, held within what the wire can carry whatever an engine reported."""
    known = [value for value in values if value is not None]
    return max(-MAX_TOTAL, min(MAX_TOTAL, sum(known))) if known else None
