"""`drain` and `undrain`: an instance starts no new KV transfer, and the signal that none is left there."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from kvtop.agents.act import Command, Facts, Outcome, Plan
from kvtop.agents.errand import Errand, Result, Tell
from kvtop.agents.instances import InstanceRecord
from kvtop.agents.orders import SetDraining
from kvtop.agents.scene import Forbidden, Scene, looking
from kvtop.agents.text import counted, span


class _Draining(Errand):
    """Sets whether instances drain."""

    several = True
    draining: ClassVar[bool]

    def __init__(self, scene: Scene, command: Command) -> None:
        """Find the instances."""
        super().__init__(scene, command)
        found = [scene.taking(scene.instance(named), "set-draining") for named in command.targets]
        self._records = list({each.newest.engine_id: each for each in found}.values())
        self._admission: dict[str, str] = {}
        """What becomes of new requests, as the API servers say, by engine id."""

    async def _order(self, record: InstanceRecord, before: Facts) -> Result | None:
        """Order it and see that it holds. Returns None where it does."""
        answered = await self.scene.order(
            record, "set-draining", lambda number: SetDraining(number, self.draining), self.time_left_s
        )
        if not answered.ok:
            return self.unanswered(record, answered, before)
        self._admission[record.newest.engine_id] = "; ".join(answered.beside)
        if not await self.shows(lambda: record.report is not None and record.draining == self.draining):
            reported = "draining" if record.draining else "not draining"
            why = f"the engine answered {answered.message!r}, but reports that it is {reported}"
            return self.result(record, "failed", why, before)
        return None

    def _make_plan(self, steps: list[str], requests: int) -> Plan:
        return Plan(
            id=self.command.id,
            verb=self.command.verb,
            targets=[each.newest.name for each in self._records],
            target_ids=[each.newest.engine_id for each in self._records],
            steps=steps,
            requests=requests,
            simulated=any(each.newest.simulated for each in self._records),
        )


class Drain(_Draining):
    """Has instances start no new KV transfer, and waits until none is left if asked to."""

    summary = "Have instances start no new KV transfer; --wait until none is left."
    draining = True

    def __init__(self, scene: Scene, command: Command) -> None:
        """Find the instances; somebody must be left to serve their roles."""
        super().__init__(scene, command)
        if not command.force:
            self._leave_somebody()

    def _leave_somebody(self) -> None:
        targets = {each.newest.engine_id for each in self._records}
        for record in self._records:
            if record.draining:
                continue
            role = record.newest.role
            others = [
                each
                for engine_id, each in self.scene.instances.records.items()
                if engine_id not in targets and each.newest.role in (role, "both") and self._serves(each)
            ]
            if not others and not self.command.serving_elsewhere:
                raise Forbidden(
                    f"{record.newest.name} is the last serving {role} instance that is known here: "
                    "undrain or start another one first, or say --force"
                )

    def _serves(self, record: InstanceRecord) -> bool:
        leaving = self.scene.leaving[record.newest.engine_id] > 0
        return record.state == "serving" and not record.draining and not leaving

    def plan(self) -> Plan:
        """Say what ends, and what goes on."""
        steps = []
        for record in self._records:
            blockers = counted(record.blockers) or "nothing"
            steps += [
                f"{record.newest.name} starts no new KV transfer from now on; requests that still arrive are "
                "served without one",
                f"{record.newest.name}: transfers under way go on to their end; now there are: {blockers}",
            ]
        steps.append("undrain reverses it")
        return self._make_plan(steps, sum(len(self.scene.live_of(each)) for each in self._records))

    async def carry_out(self, tell: Tell) -> Outcome:
        """Order it of all targets at once; then wait for all if asked to."""
        befores = [self.scene.holds(each) for each in self._records]
        ids = [each.newest.engine_id for each in self._records]
        self.scene.leaving.update(ids)
        try:
            failed = await asyncio.gather(*map(self._order, self._records, befores))
        finally:
            self.scene.leaving.subtract(ids)
        waiting = [each for each, result in zip(self._records, failed, strict=True) if result is None]
        if self.command.wait:
            await self._wait(tell, waiting)
        results = [
            result or self._judged(record, before)
            for record, before, result in zip(self._records, befores, failed, strict=True)
        ]
        left = {each.newest.name: each.blockers for each in waiting if each.blockers}
        return self.outcome(results, {"left": left})

    async def _wait(self, tell: Tell, records: list[InstanceRecord]) -> None:
        """Tell what is in the way until nothing is, or until waiting makes no sense any more."""
        async for _ in looking(self.time_left_s):
            kept = [each for each in records if each.draining and not each.drained and not each.gone]
            if not kept:
                return
            blockers: dict[str, int] = {}
            for record in kept:
                for blocker, count in record.blockers.items():
                    blockers[blocker] = blockers.get(blocker, 0) + count
            lines = [f"{each.newest.name}: left: {counted(each.blockers)}" for each in kept]
            rows = {row.id: row for each in kept for row in self.scene.live_of(each)}
            self.progress(tell, lines, blockers, list(rows.values()))

    def _judged(self, record: InstanceRecord, before: Facts) -> Result:
        """Return how it is with an instance that was told to drain."""
        if record.gone:
            ended = f"is {record.state} before it was drained" if self.command.wait else f"is {record.state}"
            return self.result(record, "failed", ended, before)
        if record.report is None:
            return self.result(record, "failed", "its engine was started anew meanwhile", before)
        if not record.draining:
            return self.result(record, "failed", "another command undrained it meanwhile", before)
        taken = self._new_requests(record)
        if record.drained:
            return self.result(record, "done", f"drained{taken}", before)
        left = f"left: {counted(record.blockers)}{taken}"
        if self.command.wait:
            message = f"draining, but not drained after {span(self.command.timeout_s)}; {left}"
            return self.result(record, "timed-out", message, before)
        return self.result(record, "done", f"draining; {left}", before)

    def _new_requests(self, record: InstanceRecord) -> str:
        """Return what becomes of requests that still arrive, as the end of a line."""
        if said := self._admission.get(record.newest.engine_id):
            return f"; {said}"
        if any(each.attached and each.hello.process == "api-server" for each in record.processes.values()):
            return ""
        return "; its API server does not report here: whether it still takes new requests is not known"


class Undrain(_Draining):
    """Has instances start KV transfers again."""

    summary = "Have drained or draining instances start KV transfers again."
    draining = False

    def plan(self) -> Plan:
        """Say what begins again."""
        return self._make_plan([f"{each.newest.name} starts KV transfers again" for each in self._records], 0)

    async def carry_out(self, tell: Tell) -> Outcome:
        """Order it of all targets at once."""
        del tell
        befores = [self.scene.holds(each) for each in self._records]
        failed = await asyncio.gather(*map(self._order, self._records, befores))
        return self.outcome(
            [
                result or self.result(record, "done", "starts KV transfers again", before)
                for record, before, result in zip(self._records, befores, failed, strict=True)
            ]
        )
