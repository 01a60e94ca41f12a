"""`cancel TRANSFER…`: ends transfers on both sides, as far as these are reachable from here.

What was posted cannot be stopped: its blocks stay in quarantine. So the outcome is what the engines answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvtop.agents.act import Command, Outcome, OutcomeState, Plan, TargetOutcome
from kvtop.agents.dispatch import Answered
from kvtop.agents.errand import Errand, Result, Tell
from kvtop.agents.events import Side
from kvtop.agents.instances import InstanceRecord
from kvtop.agents.model import LIVE_STAGES, Endpoint, Transfer
from kvtop.agents.orders import CancelTransfer
from kvtop.agents.scene import Forbidden, Misnamed, Scene, listed

SIDES: Final[tuple[Side, ...]] = ("decode", "prefill")
ROW_ID_DIGITS: Final = 18


class Cancel(Errand):
    """Ends transfers."""

    summary = "End transfers; D's requests go on without their KV, or fail, as vLLM is configured."
    several = True

    def __init__(self, scene: Scene, command: Command) -> None:
        """Find the rows, and who can be told."""
        super().__init__(scene, command)
        self._rows = [self._row(named) for named in dict.fromkeys(command.targets)]
        if not any(self._live(row) for row in self._rows):
            ended = listed(f"{row.id} ({row.stage})" for row in self._rows)
            raise Forbidden(f"nothing to cancel: it has ended already: transfer {ended}")
        if not any(self._takers(row) for row in self._rows):
            raise Forbidden("no side of it can be told: no attached instance of it takes orders")

    def _row(self, named: str) -> Transfer:
        number = int(named) if named.isascii() and named.isdigit() and len(named) <= ROW_ID_DIGITS else None
        row = None if number is None else self.scene.ledger.find(number)
        if row is None:
            live = listed(map(str, reversed(self.scene.ledger.live_ids())))
            raise Misnamed(f"there is no transfer {named!r} here (any more); live ones: {live or 'none'}")
        return row

    def _live(self, row: Transfer) -> bool:
        return row.stage in LIVE_STAGES

    def _takers(self, row: Transfer) -> dict[Side, tuple[InstanceRecord, str]]:
        """Return the sides that can be told, with their own request ids."""
        ends: dict[Side, Endpoint | None] = {"decode": row.decode, "prefill": row.prefill}
        found: dict[Side, tuple[InstanceRecord, str]] = {}
        for side, end in ends.items():
            record = self.scene.instances.records.get(end.engine_id) if end else None
            if record and end and end.request_id and record.takers("cancel-transfer"):
                found[side] = (record, end.request_id)
        return found

    def plan(self) -> Plan:
        """Say what ends, and what cannot be taken back."""
        live = [row for row in self._rows if self._live(row)]
        steps = [
            f"{self.scene.row_line(row)}: tell "
            + (" and ".join(record.newest.name for record, _ in self._takers(row).values()) or "nobody")
            for row in live
        ]
        steps += [f"transfer {row.id} has ended ({row.stage})" for row in self._rows if not self._live(row)]
        posted = [row for row in live if row.stage == "on_wire"]
        return Plan(
            id=self.command.id,
            verb=self.command.verb,
            targets=[str(row.id) for row in self._rows],
            target_ids=[str(row.id) for row in self._rows],
            steps=steps,
            irreversible=[
                "D's requests compute this KV again, or fail, as kv_load_failure_policy says",
                *(["what is on the wire cannot be stopped: its blocks stay in quarantine"] if posted else []),
            ],
            requests=len(live),
            simulated=any(row.simulated for row in self._rows),
        )

    async def carry_out(self, tell: Tell) -> Outcome:
        """Tell both sides of all transfers at once."""
        del tell
        results = await asyncio.gather(*map(self._end, self._rows))
        done = sum(each.state == "done" for each in results)
        return self.outcome(results, {"cancelled": done, "asked": len(results)})

    async def _end(self, row: Transfer) -> Result:
        takers = self._takers(row)
        if not self._live(row):
            return self._result(row, "failed", f"it has ended already ({row.stage})")
        if not takers:
            return self._result(row, "failed", "no side of it can be told")
        answers = await asyncio.gather(*(self._tell(side, *taker) for side, taker in takers.items()))
        told = "; ".join(
            f"{record.newest.name}: {answer.message}"
            for (record, _), answer in zip(takers.values(), answers, strict=True)
        )
        if any(each.ok for each in answers):
            await self.shows(lambda: not self._is_live_now(row.id))
            return self._result(row, "done", told)
        silent = any(each.timed_out for each in answers)
        return self._result(row, "timed-out" if silent else "failed", told)

    async def _tell(self, side: Side, record: InstanceRecord, request_id: str) -> Answered:
        return await self.scene.order(
            record,
            "cancel-transfer",
            lambda number: CancelTransfer(number, side, request_id),
            self.time_left_s,
        )

    def _is_live_now(self, row_id: int) -> bool:
        row = self.scene.ledger.find(row_id)
        return row is not None and self._live(row)

    def _result(self, row: Transfer, state: OutcomeState, message: str) -> Result:
        now = self.scene.ledger.find(row.id)
        return Result(
            state,
            TargetOutcome(
                target=str(row.id),
                name=f"transfer {row.id}",
                ok=state == "done",
                message=message,
                before={"stage": row.stage},
                after={"stage": now.stage if now else None},
            ),
        )
