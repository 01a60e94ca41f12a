"""`evict INSTANCE PEER`: an instance forgets a peer's NIXL state, and shakes hands with it afresh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvtop.agents.act import Command, Outcome, Plan
from kvtop.agents.errand import Argument, Errand, Tell
from kvtop.agents.orders import EVICTION_REFUSED, EvictPeer
from kvtop.agents.scene import Misnamed, Scene, other_side
from kvtop.agents.text import noun, plural


class Evict(Errand):
    """Has an instance forget one peer."""

    summary = "Have an instance forget a peer's NIXL state, so that the next request shakes hands afresh."
    arguments: ClassVar[Mapping[str, Argument]] = {"peer": Argument(), "peer_engine_id": Argument()}

    def __init__(self, scene: Scene, command: Command) -> None:
        """Find the instance and the peer."""
        super().__init__(scene, command)
        self._record = scene.taking(scene.instance(command.targets[0]), "evict-peer")
        peer = scene.peer(self._record, command)
        if peer is None:
            raise Misnamed("evict needs the argument 'peer'")
        self._peer = peer

    def plan(self) -> Plan:
        """Say what is forgotten, and when that is refused: it ends no transfer."""
        me, peer = self._record.newest, self.scene.instances.name_of(self._peer)
        rows = self.scene.live_of(self._record)
        live = sum(other_side(row, me.engine_id) == self._peer for row in rows)
        return Plan(
            id=self.command.id,
            verb=self.command.verb,
            targets=[me.name],
            target_ids=[me.engine_id],
            steps=[
                f"{me.name} forgets the NIXL state of {peer} (engine {self._peer}), now {self._state()}",
                "the next request between them shakes hands afresh",
                f"the engine refuses it while {EVICTION_REFUSED}; now there {noun(live, 'is', 'are')} "
                f"{plural(live, 'live transfer')} between them",
            ],
            irreversible=["the present connection between them"],
            simulated=me.simulated,
        )

    async def carry_out(self, tell: Tell) -> Outcome:
        """Order it; the outcome is what the engine answers."""
        del tell
        record = self._record
        before, state = self.scene.holds(record), self._state()
        answered = await self.scene.order(
            record, "evict-peer", lambda number: EvictPeer(number, self._peer), self.time_left_s
        )
        result = (
            self.result(record, "done", answered.message, before)
            if answered.ok
            else self.unanswered(record, answered, before)
        )
        facts = {"peer": self._peer, "pair_before": state, "pair_after": self._state()}
        return self.outcome([result], facts)

    def _state(self) -> str:
        pairs = self._record.report.pairs if self._record.report else []
        return next((each.state for each in pairs if each.engine_id == self._peer), "unknown")
