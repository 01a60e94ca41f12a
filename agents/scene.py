"""What a command finds on this node: targets by name, what holds there, and the way to their engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from kvtop.agents.act import FAILED, USAGE, Command, Facts, OutcomeState
from kvtop.agents.dispatch import ANSWER_TIMEOUT_S, Answered, Dispatch
from kvtop.agents.instances import InstanceRecord, Instances
from kvtop.agents.ledger import Ledger
from kvtop.agents.model import Transfer
from kvtop.agents.orders import Order, OrderKind

LOOK_S: Final = 0.1
"""How often a command that waits looks again."""
SETTLE_S: Final = 2.0
"""How long what an engine answered may take to show in what it reports."""
NAMED_MOST: Final = 10
"""Most names that one line lists."""


class Unfit(Exception):
    """A command that is not carried out; the message says why and what to do.

    Unfit
    ├── Misnamed    it cannot be understood, or names what is not there
    └── Forbidden   it is understood, and a rule or the target's state forbids it
    """

    state: ClassVar[OutcomeState] = "refused"
    exit_code: ClassVar[int] = FAILED


class Misnamed(Unfit):
    """A command that cannot be understood, or names what is not there."""

    state = "usage"
    exit_code = USAGE


class Forbidden(Unfit):
    """A command that a rule or its target's state forbids."""


@dataclass
class Scene:
    """The agent's knowledge, as far as commands need it."""

    instances: Instances
    ledger: Ledger
    dispatch: Dispatch = field(default_factory=Dispatch)
    leaving: Counter[str] = field(default_factory=Counter)
    """Engines that a command under way is about to drain: two commands must not drain the last two."""

    def instance(self, named: str) -> InstanceRecord:
        """Return the instance of that name or engine id.

        Raises:
            Misnamed: there is none, or several.
        """
        found = self._named(named)
        present = [each for each in found if not each.gone]
        if len(present or found) == 1:
            return (present or found)[0]
        if not found:
            self._refuse_observed(named)
            names = listed(sorted({each.newest.name for each in self.instances.records.values()}))
            raise Misnamed(f"no instance is called {named!r}; this agent knows {names or 'none'}")
        told = listed(f"{each.newest.engine_id} (pid {min(each.processes, default=0)})" for each in found)
        raise Misnamed(f"{named!r} is the name of {len(found)} instances: name one by its engine id: {told}")

    def _refuse_observed(self, named: str) -> None:
        """Say of a server that is only observed why nothing can be ordered there.

        Raises:
            Forbidden: it is one.
        """
        for each in self.instances.observed():
            if named in (each.engine_id, each.name):
                raise Forbidden(
                    f"{each.name} takes no orders: it is only observed, through {each.observed}; "
                    "run it with kvtop's connector"
                )

    def _named(self, named: str) -> list[InstanceRecord]:
        by_id = self.instances.records.get(named)
        if by_id is not None:
            return [by_id]
        return [each for each in self.instances.records.values() if each.newest.name == named]

    def peer(self, of: InstanceRecord, command: Command) -> str | None:
        """Return the engine id of the peer that a command names, None where it names none.

        An engine id that the client vouches for (`peer_engine_id`) is taken as it is: the peer may be on
        another node.

        Raises:
            Misnamed: there is none, or several, or it is named twice.
        """
        named, vouched = (command.arguments.get(each) for each in ("peer", "peer_engine_id"))
        if named is not None and vouched is not None:
            raise Misnamed("name the peer once, by peer or by peer_engine_id")
        return vouched if named is None else self._peer_named(of, named)

    def _peer_named(self, of: InstanceRecord, named: str) -> str:
        """Return the engine id of an instance's peer: one that this agent knows, or that its engine met.

        Raises:
            Misnamed: there is none, or several.
        """
        met = {each.engine_id for each in of.report.pairs} if of.report else set()
        met |= set(of.report.peer_modes) if of.report else set()
        met |= {other for row in self.live_of(of) if (other := other_side(row, of.newest.engine_id))}
        if named in met:
            return named
        found = [each.newest.engine_id for each in self._named(named) if each is not of]
        among = [each for each in found if each in met] or found
        if len(among) == 1:
            return among[0]
        if among:
            raise Misnamed(
                f"{named!r} is the name of several peers: name one by its engine id: {listed(among)}"
            )
        others = {each for each in self.instances.records if each != of.newest.engine_id}
        known = listed(sorted({self.instances.name_of(each) for each in met | others}))
        raise Misnamed(f"{of.newest.name} knows no peer {named!r}; it may be one of: {known or 'none'}")

    def taking(self, record: InstanceRecord, kind: OrderKind) -> InstanceRecord:
        """Return an instance that takes orders of this kind.

        Raises:
            Forbidden: it does not; the message says why.
        """
        name = record.newest.name
        if record.gone:
            why = f" ({record.state_reason})" if record.state_reason else ""
            raise Forbidden(f"{name} is {record.state}{why}: there is nothing to order")
        if record.takers(kind):
            return record
        if any(kind in each.hello.orders for each in record.processes.values()):
            raise Forbidden(
                f"the process of {name} that takes orders is not attached: it comes back, or ended"
            )
        if not record.takers():
            raise Forbidden(f"{name} takes no orders, it only reports: does it run kvtop's connector?")
        raise Forbidden(f"{name} takes no orders of the kind {kind}: is its kvtop an older one?")

    async def order(
        self, record: InstanceRecord, kind: OrderKind, make: Callable[[int], Order], timeout_s: float
    ) -> Answered:
        """Order all processes of an instance that take this kind; it is obeyed when all have obeyed.

        What those answer that take no other order (API servers) is told beside the engine's answer.
        """
        within_s = min(ANSWER_TIMEOUT_S, timeout_s)
        takers = record.takers(kind)
        answers = await asyncio.gather(*(self.dispatch.order(each, make, within_s) for each in takers))
        if not answers:
            return Answered(False, "its process detached before it was ordered", reached=False)
        beside = [
            answer.message
            for taker, answer in zip(takers, answers, strict=True)
            if answer.message and taker.hello.process == "api-server" and len(taker.hello.orders) == 1
        ]
        worst = next((each for each in answers if not each.ok), answers[0])
        return replace(worst, beside=tuple(dict.fromkeys(beside)))

    def live_of(self, record: InstanceRecord) -> list[Transfer]:
        """Return an instance's live transfers."""
        return list(self.ledger.live_of(record.newest.engine_id))

    def holds(self, record: InstanceRecord) -> Facts:
        """Return what holds at an instance, for before and after."""
        tally = self.ledger.tallies.get(record.newest.engine_id)
        facts: Facts = {
            "state": record.state,
            "mode": record.mode,
            "peer_modes": dict(record.report.peer_modes) if record.report else {},
            "draining": record.draining if record.report else None,
            "blockers": record.blockers if record.report else None,
            "live_transfers": len(tally.live) if tally else 0,
        }
        return facts

    def row_line(self, row: Transfer) -> str:
        """Return a transfer as one line for people: id, stage, age, from and to."""
        age_s = (time.monotonic_ns() - row.stage_since_ns) / 1e9
        prefill, decode = (side.name if side else "–" for side in (row.prefill, row.decode))
        return f"transfer {row.id} {row.direction or '–'} {prefill} → {decode}: {row.stage} for {age_s:.1f} s"


def other_side(row: Transfer, engine_id: str) -> str | None:
    """Return the engine id of a transfer's other side."""
    return next(
        (side.engine_id for side in (row.prefill, row.decode) if side and side.engine_id != engine_id), None
    )


def listed(names: Iterable[str]) -> str:
    """Return names as one text, the first few of many.

    >>> listed(["a", "b"]), listed(map(str, range(12)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more')
    """
    every = list(names)
    more = len(every) - NAMED_MOST
    return ", ".join(every[:NAMED_MOST]) + (f" and {more} more" if more > 0 else "")


async def looking(timeout_s: float) -> AsyncIterator[float]:
    """Yield at once, then every `LOOK_S`, how many seconds have passed; the last time after `timeout_s`."""
    began_s = time.monotonic()
    while True:
        elapsed_s = time.monotonic() - began_s
        yield elapsed_s
        if elapsed_s >= timeout_s:
            return
        await asyncio.sleep(min(LOOK_S, timeout_s - elapsed_s))
