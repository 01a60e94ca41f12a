"""`mode INSTANCE push|pull`: which direction new requests take, proved by the transfers that follow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar, cast

from kvtop.agents.act import Command, Facts, Outcome, Plan
from kvtop.agents.errand import Argument, Errand, Tell
from kvtop.agents.events import Direction
from kvtop.agents.model import Transfer
from kvtop.agents.orders import SetMode
from kvtop.agents.scene import Scene, listed, looking, other_side
from kvtop.agents.text import noun, plural, span

OTHER: dict[Direction, Direction] = {"push": "pull", "pull": "push"}
DOES: dict[Direction, str] = {"push": "pushes", "pull": "pulls"}
SELDOM_NAMED = "routers usually do not name it to P"
P_WINS = "a decode request that comes with P's answer takes P's direction all the same"


class Switch(Errand):
    """Sets the direction of an instance, for all its peers or for one."""

    summary = "Set the direction that an instance's new requests take."
    arguments: ClassVar[Mapping[str, Argument]] = {
        "mode": Argument(("push", "pull"), required=True),
        "peer": Argument(),
        "peer_engine_id": Argument(),
    }

    def __init__(self, scene: Scene, command: Command) -> None:
        """Find the instance and the peer."""
        super().__init__(scene, command)
        self._record = scene.taking(scene.instance(command.targets[0]), "set-mode")
        self._mode = cast("Direction", command.arguments["mode"])
        self._peer = scene.peer(self._record, command)
        self._ordered_ns = 0
        self._version = scene.ledger.version
        self._begun: set[int] = set()
        self._begun_old: set[int] = set()
        """Transfers first seen after the order, in the new direction and in the old one all the same."""
        self._proof: Transfer | None = None

    @property
    def _peer_name(self) -> str:
        return self.scene.instances.name_of(self._peer or "")

    @property
    def _with(self) -> str:
        return f" with {self._peer_name}" if self._peer else ""

    @property
    def _is_decode(self) -> bool:
        return self._record.newest.role == "decode"

    @property
    def _now(self) -> Direction:
        report = self._record.report
        if self._peer and report:
            return report.peer_modes.get(self._peer, report.mode)
        return self._record.mode

    def plan(self) -> Plan:
        """Say what changes, and that what is under way does not."""
        name, old = self._record.newest.name, self._old_rows()
        exceptions = self._record.report.peer_modes if self._record.report and not self._peer else {}
        steps = [f"{name}: requests that arrive from now on {self._mode}{self._with}; now they {self._now}"]
        if exceptions:
            steps.append(
                f"its {noun(len(exceptions), 'exception')} for {plural(len(exceptions), 'peer')} "
                f"{noun(len(exceptions), 'is', 'are')} forgotten"
            )
        if self._peer and not self._is_decode:
            steps.append(f"only requests that name {self._peer_name} take it: {SELDOM_NAMED}")
        if self._is_decode:
            steps.append(P_WINS)
        steps.append(f"{self._still(len(old))}{self._with}; what is under way finishes as it began")
        return Plan(
            id=self.command.id,
            verb=self.command.verb,
            targets=[name],
            target_ids=[self._record.newest.engine_id],
            steps=steps,
            irreversible=["the exceptions that are forgotten"] if exceptions else [],
            simulated=self._record.newest.simulated,
        )

    async def carry_out(self, tell: Tell) -> Outcome:
        """Order it, see that the engine reports it, and wait for its proof if asked to."""
        record, before = self._record, self.scene.holds(self._record)
        self._ordered_ns = time.monotonic_ns()
        answered = await self.scene.order(
            record, "set-mode", lambda number: SetMode(number, self._mode, self._peer), self.time_left_s
        )
        if not answered.ok:
            return self.outcome([self.unanswered(record, answered, before)], self._facts())
        if not await self.shows(self._holds):
            why = f"the engine answered {answered.message!r}, but does not report {self._mode}{self._with}"
            return self.outcome([self.result(record, "failed", why, before)], self._facts())
        if self.command.wait:
            return await self._prove(tell, before)
        facts = self._facts()
        message = (
            f"{self._set}; {self._still(facts['old_mode_live'])}; "
            f"the latest transfer seen: {facts['latest_transfer_mode'] or 'none'}"
        )
        return self.outcome([self.result(record, "done", message, before)], facts)

    @property
    def _set(self) -> str:
        """What an order that the engine has obeyed has set, and what it may not reach."""
        if self._is_decode:
            return f"new requests {self._mode}{self._with}, but {P_WINS}: set it on P"
        if not self._peer:
            return f"new requests {self._mode}"
        return (
            f"set for requests that name {self._peer_name}: they {self._mode}; {SELDOM_NAMED}, so use --wait "
            "to see whether it has effect, or leave --peer out"
        )

    def _still(self, count: int) -> str:
        """Say how many live transfers go the old way."""
        old = OTHER[self._mode]
        return plural(count, f"live transfer still {DOES[old]}", f"live transfers still {old}")

    async def _prove(self, tell: Tell, before: Facts) -> Outcome:
        """Wait until the old transfers are gone and a new one has completed."""
        record = self._record
        old: list[Transfer] = []
        async for _ in looking(self.time_left_s):
            if not self._holds():
                why = (
                    f"is {record.state}" if record.gone else f"another command made it {self._now} meanwhile"
                )
                return self.outcome([self.result(record, "failed", why, before)], self._facts())
            self._look()
            old = self._old_rows()
            if self._proof is not None and not old:
                message = (
                    f"new requests {self._mode}{self._with}, as transfer {self._proof.id} did; "
                    f"none in the old direction is left"
                )
                return self.outcome([self.result(record, "done", message, before)], self._facts())
            proved = "a new transfer has" if self._proof else "no new transfer has yet"
            self.progress(tell, [f"{proved} completed as {self._mode}; {self._still(len(old))}"], rows=old)
        left = [f"{self._still(len(old))} ({listed(str(row.id) for row in old)})"] if old else []
        if self._proof is None:
            left.append(self._unproved())
        after = f"but after {span(self.command.timeout_s)}"
        message = f"new requests {self._mode}{self._with}, {after} {' and '.join(left)}"
        return self.outcome([self.result(record, "timed-out", message, before)], self._facts())

    def _unproved(self) -> str:
        """Say why nothing has proved the new direction."""
        if began := len(self._begun):
            which = "the one" if began == 1 else f"none of the {began}"
            return f"{which} that began as {self._mode} has {'not ' if began == 1 else ''}completed"
        if not self._begun_old:
            return "no traffic came to prove it"
        why = "do not name it" if self._peer and not self._is_decode else "name a direction"
        since = plural(len(self._begun_old), "transfer")
        return f"{since} first seen since did not take it: their requests came before the order, or {why}"

    def _holds(self) -> bool:
        report = self._record.report
        if report is None or self._record.gone:
            return False
        return self._now == self._mode and (self._peer is not None or not report.peer_modes)

    def _is_ours(self, row: Transfer) -> bool:
        return self._peer is None or other_side(row, self._record.newest.engine_id) == self._peer

    def _old_rows(self) -> list[Transfer]:
        """Return the live transfers that go the old way.

        Where a router asks P and D at once, D expects a push until P has answered. What it has so registered
        since the order goes no way yet.
        """
        rows = self.scene.live_of(self._record)
        return [
            row
            for row in rows
            if row.direction == OTHER[self._mode] and self._is_ours(row) and not self._undecided(row)
        ]

    def _undecided(self, row: Transfer) -> bool:
        return row.first_seen_ns >= self._ordered_ns > 0 and self.scene.ledger.awaits_prefill(row.id)

    def _look(self) -> None:
        """Take note of transfers that began after the order and go the new way."""
        engine_id = self._record.newest.engine_id
        changed, _ = self.scene.ledger.changes(self._version)
        self._version = self.scene.ledger.version
        for row in changed:
            sides = {side.engine_id for side in (row.prefill, row.decode) if side}
            if engine_id not in sides or not self._is_ours(row):
                continue
            if row.first_seen_ns < self._ordered_ns:
                continue
            if row.direction == self._mode:
                self._begun.add(row.id)
                self._begun_old.discard(row.id)
                moved = row.stage == "done" and "skipped" not in row.times_ns
                self._proof = row if moved and self._proof is None else self._proof
            elif row.direction == OTHER[self._mode]:
                self._begun_old.add(row.id)

    def _facts(self) -> Facts:
        latest = self.scene.ledger.latest_of(self._record.newest.engine_id)
        return {
            "mode_asked": self._mode,
            "peer": self._peer,
            "latest_transfer": latest.id if latest else None,
            "latest_transfer_mode": latest.direction if latest else None,
            "old_mode_live": len(self._old_rows()),
            "proved_by_transfer": self._proof.id if self._proof else None,
        }
