"""D's side of a push, on the engine's thread: what it has registered for, and what may still be written.

A request of D's ends when P says that nothing will come, when it is given up, or when its KV is there. If P
may still write after that, P is asked to drop it; until P has answered, is known to be dead, or (a stock P)
cannot hold its lease any more, the request is unsettled, and the scheduler side keeps its blocks from reuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, takewhile
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from kvtop.agents.events import ErrorClass
from kvtop.connector.contained import contained
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.outbox import Outbox, drain, peer_of
from kvtop.connector.params import are_block_ids
from kvtop.connector.peer_messages import Drop, Failed, Peer, Read, Settled, encode, is_kvtop_agent
from kvtop.connector.probe import Probed
from kvtop.connector.telemetry import Telemetry

PROBE_S: Final = 2.0
"""How often D looks whether a peer that it waits for, or that may still write, is alive."""


class Registered(NamedTuple):
    """Whom D has told where to write."""

    peer: Peer
    itself: Peer
    agents: set[str]
    since_s: float
    """time.monotonic()."""


@dataclass
class Unsettled:
    """One of D's requests that ended although its KV may still be written."""

    agents: set[str]
    peer: Peer
    since_s: float = field(default_factory=time.monotonic)


class Awaiting(Outbox):
    """What D waits for."""

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self._answers: SimpleQueue[tuple[str, Failed | Read | Settled]] = SimpleQueue()
        self._probes: SimpleQueue[tuple[str, Probed]] = SimpleQueue()
        self._registered: dict[str, Registered] = {}  # by D's request id
        self._unsettled: dict[str, Unsettled] = {}
        self._probed_s: dict[str, float] = {}  # by engine id
        self._unwell: set[str] = set()  # engine ids of peers that did not answer the latest probe
        self._reasons: dict[str, tuple[ErrorClass, str]] = {}
        self.read_instead: Callable[[str, Any], None] = lambda _request_id, _meta: None
        """Called with a request that is to be read, and its metadata."""

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        peer = Peer(
            reg_data["remote_engine_id"],
            reg_data["remote_host"],
            reg_data["remote_port"],
            reg_data["remote_tp_size"],
            reg_data.get("remote_pp_size", 1),
        )
        agents = set(self.agents_of(peer.engine_id))
        self._registered[req_id] = Registered(peer, peer_of(reg_data), agents, time.monotonic())
        super()._do_send_reg_notif(req_id, reg_data)
        self._telemetry.step("decode", req_id, "registered", None, rank=self.tp_rank)

    def give_up(self, request_id: str, error_class: ErrorClass, reason: str) -> bool:
        """End D's wait for a push. Returns False where it has ended already."""
        if request_id not in self._recving_metadata:
            return False
        self._reasons[request_id] = (error_class, reason)
        self._failed_recv_reqs.put(request_id)
        return True

    @contained
    def _after_failure(self, request_id: str) -> None:
        """Ask P to drop a request of D's that failed; until P answers, its blocks are in quarantine."""
        error_class, reason = self._reasons.pop(request_id, ("transport", "the KV did not arrive on D"))
        self._telemetry.step(
            "decode", request_id, "failed", "push", error_class=error_class, error=reason, rank=self.tp_rank
        )
        registered = self._registered.pop(request_id, None)
        if registered is None or not registered.agents:
            self.settled[request_id] += 1
            return
        self._unsettled[request_id] = Unsettled(registered.agents, registered.peer)
        drop = encode(Drop(request_id, reason, reply_to=registered.itself))
        for agent in registered.agents:
            if is_kvtop_agent(agent):
                self._notify(agent, drop)

    @contained
    def _hear_answers(self) -> None:
        """Take what P said about D's requests."""
        for agent, answer in drain(self._answers):
            if isinstance(answer, Read):
                self._read(answer)
                continue
            registered = self._registered.get(answer.request_id)
            if isinstance(answer, Failed):
                self.give_up(answer.request_id, answer.error_class, f"P: {answer.reason}")
            if isinstance(answer, Settled) or answer.settled:
                if registered is not None:
                    registered.agents.discard(agent)
                self._settle(answer.request_id, agent)

    def _read(self, offer: Read) -> None:
        """Go over to reading what D has registered for; of several ranks' offers the first will do."""
        registered = self._registered.get(offer.request_id)
        meta = self._recving_metadata.get(offer.request_id)
        if registered is None or meta is None or offer.request_id in self._recving_transfers:
            return
        if not are_block_ids(offer.block_ids, len(self.kv_cache_config.transfer_groups)):
            self.give_up(offer.request_id, "parameters", "P offered blocks that D cannot read")
            return
        del self._registered[offer.request_id], self._recving_metadata[offer.request_id]
        meta.awaiting_kvs = True
        meta.remote.block_ids = offer.block_ids
        meta.remote.request_id = offer.prefill_request_id
        meta.remote.port = offer.port
        self.read_instead(offer.request_id, meta)

    def _late_write(self, request_id: str) -> None:
        """Take note of a write for a request that D has given up: so a stock peer settles."""
        if not any(map(is_kvtop_agent, self._unsettled[request_id].agents)):
            self._settle(request_id, all_agents=True)

    def _settle(self, request_id: str, agent: str = "", *, all_agents: bool = False) -> None:
        unsettled = self._unsettled.get(request_id)
        if unsettled is None:
            return
        unsettled.agents.discard(agent)
        if all_agents or not unsettled.agents:
            del self._unsettled[request_id]
            self.settled[request_id] += 1

    def _settle_all_of(self, engine_id: str) -> None:
        for request_id in [r for r, each in self._unsettled.items() if each.peer.engine_id == engine_id]:
            self._settle(request_id, all_agents=True)

    @contained
    def _look_after_peers(self) -> None:
        """End what a peer that is gone cannot do any more; a stock one's late writes end with its lease."""
        now = time.monotonic()
        for engine_id, probed in drain(self._probes):
            self._take_probe(engine_id, probed)
        for request_id, each in list(self._unsettled.items()):
            if not any(map(is_kvtop_agent, each.agents)) and now - each.since_s > self.stock_lease_s:
                self._settle(request_id, all_agents=True)
        tables: tuple[tuple[Registered | Unsettled, ...], ...] = (
            tuple(self._unsettled.values()),
            tuple(self._registered.values()),  # a copy: the writer adds to it
        )
        oldest_first = (takewhile(lambda each: now - each.since_s > PROBE_S, table) for table in tables)
        peers = {each.peer.engine_id: each.peer for each in chain.from_iterable(oldest_first)}
        self._probed_s = {each: at_s for each, at_s in self._probed_s.items() if each in peers}
        for engine_id, peer in peers.items():
            if now - self._probed_s.get(engine_id, 0.0) > PROBE_S:
                self._probed_s[engine_id] = now
                self._shared.probe(engine_id, peer.host, peer.port, self._handle_probe)

    def _take_probe(self, engine_id: str, probed: Probed) -> None:
        if probed.state == "gone":
            self._end_all_of(engine_id, probed.reason)
        if probed.state != "alive":
            self._unwell.add(engine_id)
            self._note_pair(engine_id, "failed", probed.reason)
        elif engine_id in self._unwell:
            self._unwell.discard(engine_id)
            self._note_pair(engine_id, "ready")

    @property
    def stock_lease_s(self) -> float:
        """After how long a stock peer, which cannot answer, is taken to write no more, in seconds.

        Twice the lease that both are configured with: no heartbeat renews it once D has given up, and a write
        is not posted after its end.
        """
        return 3.0 * float(self._lease_extension)  # upstream: an extension is two thirds of the lease

    def _handle_probe(self, engine_id: str, probed: Probed) -> None:
        """Take what the prober's thread has seen."""
        self._probes.put((engine_id, probed))

    def _end_all_of(self, engine_id: str, reason: str) -> None:
        """End what waits for an engine that can write no more."""
        for request_id, registered in list(self._registered.items()):
            if registered.peer.engine_id == engine_id:
                registered.agents.clear()
                self.give_up(request_id, "transport", reason)
        self._settle_all_of(engine_id)

    @contained
    def _part_from_replaced(self) -> None:
        """End what waits for engines that came back as others, and forget them when nothing uses them."""
        for engine_id in list(self.replaced):
            self._end_all_of(engine_id, "the peer came back as another engine")
            if self.evict(engine_id):
                self.replaced.remove(engine_id)
