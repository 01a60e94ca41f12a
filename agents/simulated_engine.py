"""A simulated engine: what it reports of itself, and how it obeys orders."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import msgspec

from kvtop import __version__
from kvtop.agents.events import (
    Blocker,
    Direction,
    EngineEvent,
    EngineHello,
    EngineStats,
    InstanceReport,
    OrderAnswer,
    PairReport,
    PairState,
    Role,
    Side,
)
from kvtop.agents.orders import (
    EVICTED,
    EVICTION_REFUSED,
    ORDER_KINDS,
    CancelTransfer,
    EvictPeer,
    Order,
    SetDraining,
    SetMode,
)
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import WIRE_VERSION, Clock

KV_BLOCKS: Final = 4096
REPORT_S: Final = 0.2
"""How often an engine that does not drain reports its blockers, at most."""
BUSY: Final[frozenset[Blocker]] = frozenset(("writes", "reads", "registrations"))
"""What keeps an engine from forgetting its one peer."""
Canceller = Callable[[Side, str], tuple[bool, str]]
"""Ends one side of a request's transfer; returns whether, and what to tell the operator."""

Orders = SimpleQueue[tuple["SimulatedEngine", Order]]


class SimulatedEngine:
    """One instance: a reporter, the counts behind its load, and what it was ordered."""

    def __init__(self, name: str, role: Role, mode: Direction, paths: RuntimePaths, orders: Orders) -> None:
        """Attach to the agent in `paths`, starting one if none runs.

        What is ordered goes into `orders` on the reporter's thread, to be obeyed on the simulation's.
        """
        self.engine_id = f"simulated-{uuid.uuid4()}"
        self.mode: Direction = mode
        self.peer_modes: dict[str, Direction] = {}
        self.draining = False
        self.blocking: dict[str, Blocker] = {}
        """By request id: what of it would keep the instance from being drained."""
        self.running = 0
        self.waiting = 0
        self.blocks = 0
        self.quarantined: dict[str, tuple[int, int]] = {}
        """By request id: how many blocks nobody may use, and since when (CLOCK_MONOTONIC, ns)."""
        self.pairs: dict[str, PairReport] = {}
        self._reported: InstanceReport | None = None
        self._report_due_s = 0.0
        self.reporter = Reporter(
            EngineHello(
                wire_version=WIRE_VERSION,
                software=f"kvtop {__version__}, simulated engine",
                process="api-server",
                pid=os.getpid(),
                engine_id=self.engine_id,
                name=name,
                role=role,
                mode=mode,
                model="simulated",
                clock=Clock(time.monotonic_ns(), time.time_ns()),
                simulated=True,
                orders=list(ORDER_KINDS),
            ),
            paths,
            on_order=lambda order: orders.put((self, order)),
        )
        self.reporter.start()
        self.report()

    def put(self, event: EngineEvent) -> None:
        """Report one event."""
        self.reporter.put(event)

    def change_load(self, running: int, blocks: int) -> None:
        """Let requests and KV blocks come or go, and report the load."""
        self.running += running
        self.blocks = max(0, self.blocks + blocks)
        usage = min(1.0, self.blocks / KV_BLOCKS)
        self.put(
            EngineStats(at_ns=time.monotonic_ns(), running=self.running, waiting=self.waiting, kv_usage=usage)
        )

    def mode_with(self, peer: SimulatedEngine) -> Direction:
        """Return the direction of a transfer that begins now."""
        return self.peer_modes.get(peer.engine_id, self.mode)

    def has_met(self, peer: SimulatedEngine) -> bool:
        """Whether no handshake with a peer is needed: it is at first, and after an eviction or a failure."""
        known = self.pairs.get(peer.engine_id)
        return known is not None and known.state == "ready"

    def note_pair(self, peer_engine_id: str, state: PairState, reason: str = "") -> None:
        """Note how it is with a peer, where that is new."""
        known = self.pairs.get(peer_engine_id)
        if known is None or state == "failed" or known.state != state:
            self.pairs[peer_engine_id] = PairReport(peer_engine_id, state, time.monotonic_ns(), reason)

    def report(self) -> None:
        """Report what holds, where it has changed."""
        self._report_due_s = time.monotonic() + REPORT_S
        report = InstanceReport(
            at_ns=0,
            mode=self.mode,
            peer_modes=dict(self.peer_modes),
            draining=self.draining,
            blockers=dict(Counter(self.blocking.values())),
            quarantined_blocks=sum(blocks for blocks, _ in self.quarantined.values()),
            quarantined_since_ns=min((since_ns for _, since_ns in self.quarantined.values()), default=None),
            pairs=list(self.pairs.values()),
        )
        if report != self._reported:
            self._reported = report
            self.put(msgspec.structs.replace(report, at_ns=time.monotonic_ns()))

    def report_in_time(self) -> None:
        """Report what holds where that is due."""
        if self.draining or time.monotonic() >= self._report_due_s:
            self.report()

    def obey(self, order: Order, cancel: Canceller) -> None:
        """Obey one order, report what holds then, and answer."""
        ok, message = self._obey(order, cancel)
        self.report()
        self.put(OrderAnswer(time.monotonic_ns(), order.order_id, ok, f"simulated: {message}"))

    def _obey(self, order: Order, cancel: Canceller) -> tuple[bool, str]:
        match order:
            case SetMode(mode=mode, peer=None):
                self.mode, self.peer_modes = mode, {}
                return True, f"new requests {mode}"
            case SetMode(mode=mode, peer=str(peer)):
                self.peer_modes[peer] = mode
                return True, f"new requests {mode} with that peer"
            case SetDraining(draining=draining):
                self.draining = draining
                return True, "no new transfer starts" if draining else "transfers start again"
            case CancelTransfer(side=side, request_id=request_id):
                return cancel(side, request_id)
            case EvictPeer(peer_engine_id=peer):
                if peer in self.pairs and not BUSY.isdisjoint(self.blocking.values()):
                    return False, EVICTION_REFUSED
                if peer in self.pairs:
                    self.note_pair(peer, "evicted")
                return True, EVICTED
        return False, "such an order is not known here"
