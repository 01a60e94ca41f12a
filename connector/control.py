"""What an operator may order, and what holds: the scheduler side's state beyond upstream's.

Orders come from the node agent on a thread of the reporter's, are queued, and are obeyed on the engine's
thread in its next step; an idle engine is woken for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from kvtop.agents.events import Blocker, Direction, ErrorClass, InstanceReport, PairReport
from kvtop.agents.orders import (
    EVICTED,
    EVICTION_REFUSED,
    CancelTransfer,
    EvictPeer,
    Order,
    SetDraining,
    SetMode,
)
from kvtop.connector.halves import GiveUp, Tasks, Unwanted, WorkerReport
from kvtop.connector.inbound import Inbound
from kvtop.connector.peer_messages import Peer
from kvtop.connector.routing import Router
from kvtop.connector.telemetry import Telemetry

DRAINING_REASON = "P drains: it starts no new transfer"


class Control:
    """Mode, draining, deadlines, quarantine, and the orders that change them."""

    def __init__(
        self,
        router: Router,
        inbound: Inbound,
        telemetry: Telemetry,
        wake: Callable[[], None],
        *,
        ranks: int,
    ) -> None:
        """Serve one instance of so many ranks; `wake` makes an idle engine step."""
        self.draining = False
        self.held: dict[str, Direction] = {}
        """P's requests whose blocks are held for D, and in which direction they are expected to go."""
        self._router, self._inbound, self._telemetry = router, inbound, telemetry
        self._tasks = Tasks()
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._pairs: dict[str, PairReport] = {}
        self._wire = (0, 0)
        self._ranks = ranks
        self._evicting: dict[int, tuple[str, Counter[bool]]] = {}
        """Evictions by order id: the peer, and how many ranks have forgotten it, and how many could not."""
        self._last: InstanceReport | None = None
        telemetry.obey(self._orders.put, wake)
        self.report()

    # What the connector asks.

    @property
    def has_work(self) -> bool:
        """Whether the engine must step although no request is scheduled."""
        return self.is_urgent or bool(self._inbound.quarantine)

    @property
    def is_urgent(self) -> bool:
        """Whether something waits for the very next step."""
        return not self._orders.empty() or bool(self._tasks)

    def refuse(self, request_id: str, error_class: ErrorClass, reason: str) -> None:
        """P has no KV to give for a request: D is to be told."""
        self._tasks.refused[request_id] = (error_class, reason)

    def hold_for_reader(self, request_id: str) -> None:
        """P's finished blocks are expected to be read."""
        self._tasks.for_readers.add(request_id)

    def give_up(self, request_id: str, error_class: ErrorClass, reason: str) -> bool:
        """D's request must not wait any longer. Returns False where it does not wait."""
        if request_id not in self._inbound.awaited:
            return False
        self._tasks.give_ups.setdefault(request_id, GiveUp(error_class, reason))
        return True

    def decline(self, request_id: str, params: dict[str, Any], reason: str) -> None:
        """D does not want the KV that P holds, or will hold, for a request."""
        peer = Peer(
            params["remote_engine_id"],
            params["remote_host"],
            params["remote_port"],
            params.get("tp_size") or 1,
            params.get("pp_size") or 1,
        )
        self._tasks.unwanted.append(Unwanted(peer, request_id, params.get("remote_request_id"), reason))

    # Once a step.

    def next_tasks(self) -> Tasks:
        """Obey what was ordered, end what is overdue, and return what the workers are to do."""
        for order in _drain(self._orders):
            self._obey(order)
        for request_id, _ in self._inbound.overdue():
            overdue = GiveUp("expiry", "the KV did not arrive within D's deadline")
            self._tasks.give_ups.setdefault(request_id, overdue)
        tasks, self._tasks = self._tasks, Tasks()
        return tasks

    def hear(self, workers: WorkerReport | None) -> None:
        """Take the workers' report of a step."""
        if workers is not None:
            for request_id in self._inbound.settle(workers.settled):
                self._telemetry.step("decode", request_id, "settled", None)
            self._wire = (workers.writes, workers.reads)
            self._pairs.update(workers.pairs)
            self._hear_evictions(workers)

    def _hear_evictions(self, workers: WorkerReport) -> None:
        """Answer those that all ranks have tried."""
        for (order_id, forgotten), ranks in workers.evictions.items():
            self._evicting[order_id][1][forgotten] += ranks
        for order_id in [each for each, (_, tried) in self._evicting.items() if tried.total() >= self._ranks]:
            peer, tried = self._evicting.pop(order_id)
            busy = tried[False]
            if not busy and peer in self._pairs and self._pairs[peer].state == "failed":
                self._pairs[peer] = PairReport(peer, "evicted", time.monotonic_ns())
            self._telemetry.answer(order_id, ok=not busy, message=EVICTION_REFUSED if busy else EVICTED)

    def report(self) -> None:
        """Tell the agent what holds, where it changed."""
        report = InstanceReport(
            at_ns=0,
            mode=self._router.mode,
            peer_modes=dict(self._router.peer_modes),
            draining=self.draining,
            blockers=self._blockers(),
            quarantined_blocks=self._inbound.quarantined_blocks,
            quarantined_since_ns=self._inbound.quarantined_since_ns,
            pairs=list(self._pairs.values()),
        )
        if report != self._last:
            self._last = report
            self._telemetry.put(msgspec.structs.replace(report, at_ns=time.monotonic_ns()))

    def _blockers(self) -> dict[Blocker, int]:
        writes, reads = self._wire
        counts: dict[Blocker, int] = {
            "writes": writes,
            "reads": reads,
            "leases": max(0, len(self.held) - writes),
            "registrations": max(0, len(self._inbound.awaited) - reads),
            "quarantine": len(self._inbound.quarantine),
        }
        return {blocker: count for blocker, count in counts.items() if count}

    # Orders.

    def _obey(self, order: Order) -> None:
        match order:
            case SetMode():
                self._router.set_mode(order.mode, order.peer)
                self.report()
                self._telemetry.answer(order.order_id, ok=True, message=f"new requests {order.mode}")
            case SetDraining():
                self.draining = order.draining
                self.report()
                what = "no new transfer starts" if order.draining else "transfers start again"
                self._telemetry.answer(order.order_id, ok=True, message=what)
            case CancelTransfer():
                self._cancel(order)
            case EvictPeer():
                self._tasks.evictions[order.order_id] = order.peer_engine_id
                self._evicting[order.order_id] = (order.peer_engine_id, Counter())

    def _cancel(self, order: CancelTransfer) -> None:
        reason = "cancelled by an operator"
        if order.side == "decode":
            waited = self.give_up(order.request_id, "cancel", reason)
            self._telemetry.answer(
                order.order_id,
                ok=waited,
                message="the request goes on without this KV; its blocks are kept until no write can come"
                if waited
                else "this request waits for no KV: it has arrived, or the request has ended",
            )
            return
        if self.held.get(order.request_id) == "pull":
            reading = (
                "D may be reading these blocks, which P cannot stop: cancel it on D, or let the lease end"
            )
            self._telemetry.answer(order.order_id, ok=False, message=reading)
            return
        held = order.request_id in self.held
        if held:
            self._tasks.cancels[order.request_id] = ("cancel", reason)
        self._telemetry.answer(
            order.order_id,
            ok=held,
            message="no write is posted any more; one that is on the wire keeps its blocks until it ends"
            if held
            else "P holds no blocks of this request: they are fetched, freed, or not computed yet",
        )


def _drain(queue: SimpleQueue[Order]) -> list[Order]:
    """Return what a queue holds now."""
    orders = []
    try:
        while True:
            orders.append(queue.get_nowait())
    except Empty:
        return orders
