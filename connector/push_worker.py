"""Upstream's push worker: on P it writes, on D it registers and waits.

Added to upstream: work reaches the writer thread before the forward pass; the writer polls what it has
posted, so that D is told at once; a write is never posted, nor its blocks freed, out of step with P's lease;
and both sides tell each other when a transfer will not come (`kvtop.connector.peer_messages`). P's blocks are
held here for readers too, so that a peer may register for blocks that were meant to be read, and is served.

Who may touch what: the writer thread owns what is matched, posted and refused; the engine's thread owns
leases and what D waits for. Between them there are only queues, and the set of held blocks under its lock.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import msgspec

from kvtop.agents.events import ErrorClass
from kvtop.connector.contained import contained
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.observed import Observed, timed_out
from kvtop.connector.params import BadParameter, are_block_ids, beyond, check_registration
from kvtop.connector.peer_messages import (
    Drop,
    Failed,
    Peer,
    PeerMessage,
    Read,
    Settled,
    agent_name,
    decode,
    encode,
    is_kvtop_agent,
)
from kvtop.connector.probe import Probed
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import (
    PUSH_REG_NOTIF_PREFIX,
    NixlPushConnectorWorker,
    get_base_request_id,
    init_logger,
)

logger = init_logger("vllm.kvtop.push_worker")

POLL_S: Final = 0.001
"""How often the writer looks after writes on the wire, and for registrations that its blocks wait for."""
IDLE_POLL_S: Final = 0.05
"""How often it looks for messages while there is nothing to do: an idle engine does not step, and NIXL wakes
nobody. A D that asks an idle P must not wait for the next request there."""
HANDSHAKE_ATTEMPTS: Final = 3
REMEMBERED: Final = 4096
"""How many refusals and ended pushes are remembered for messages that are still to come."""
REFUSALS_KEPT_S: Final = 120.0
PROBE_S: Final = 2.0
"""How often D looks whether a peer that may still write is alive."""


@dataclass
class _Push:
    """One transfer on P, from its match to its end. Owned by the writer."""

    request_id: str
    blocks: Any
    registration: dict[str, Any]
    attempts: int = 0
    posted: bool = False
    dropped: bool = False
    """Whether D wants to be told once nothing can be written any more."""


class _Registered(NamedTuple):
    """Whom D has told where to write."""

    peer: Peer
    itself: Peer
    agents: set[str]


@dataclass
class _Unsettled:
    """One of D's requests that ended although its KV may still be written. Owned by the engine's thread."""

    agents: set[str]
    peer: Peer
    since_s: float = field(default_factory=time.monotonic)
    probed_s: float = 0.0


class _Refusal(NamedTuple):
    """Why P will not write for a request, remembered for a registration or blocks that are still to come."""

    at_s: float
    error_class: ErrorClass
    reason: str
    by_decode: bool


class PushWorker(Observed, NixlPushConnectorWorker):
    """P's writes and D's registrations, observed; each can be refused, dropped and given up."""

    direction = "push"
    initiator = "prefill"

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self._shared = shared
        self._guard = threading.Lock()
        self._stats_guard = threading.Lock()
        self._held: set[str] = set()  # under the guard: finished blocks that are P's to give
        self._for_readers: set[str] = set()  # held, and perhaps being read at this moment
        self._posting: set[str] = set()  # under the guard: held, and being written or about to be
        self._pushes: dict[str, _Push] = {}  # by D's request id
        self._finished: OrderedDict[str, None] = OrderedDict()  # D's ids of the latest pushes that ended
        self._refusals: OrderedDict[str, _Refusal] = OrderedDict()  # by base request id
        self._ended: SimpleQueue[tuple[str, ErrorClass, str]] = SimpleQueue()
        self._cancelled: SimpleQueue[tuple[str, ErrorClass, str]] = SimpleQueue()
        self._started: SimpleQueue[str] = SimpleQueue()
        self._drops: SimpleQueue[Drop] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[Peer, PeerMessage | bytes]] = SimpleQueue()
        self._handshakes_failed: SimpleQueue[tuple[str, BaseException]] = SimpleQueue()
        self._written: SimpleQueue[tuple[set[str], set[str]]] = SimpleQueue()
        self._released: SimpleQueue[str] = SimpleQueue()
        self._answers: SimpleQueue[tuple[str, Failed | Read | Settled]] = SimpleQueue()
        self._probes: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.pull_port = 0
        """Where this engine's pull half serves handshakes."""
        self.read_instead: Callable[[str, Any], None] = lambda _request_id, _meta: None
        """Called on D's engine thread with a request that is to be read, and its metadata."""
        self._registered: dict[str, _Registered] = {}  # on D, by its request id
        self._unsettled: dict[str, _Unsettled] = {}
        self.reasons: dict[str, tuple[ErrorClass, str]] = {}
        self.nixl_wrapper.on_arrival = self._push_writer_wake.set
        self.nixl_wrapper.on_peer_message = self._take_peer_message
        self.nixl_wrapper.on_completion = self._pending_completion_notifs.put

    @property
    def writes(self) -> int:
        """How many requests have writes on the wire."""
        return len(self._sending_transfers)

    # --- Before the forward pass, on the engine's thread ---------------------------------------------------

    @contained
    def hand_over(
        self, metadata: Any, refused: Mapping[str, tuple[ErrorClass, str]], for_readers: set[str]
    ) -> None:
        """Give the writer thread this step's registrations, finished blocks and refusals at once.

        Upstream does it in `start_load_kv`, which vLLM calls after the forward pass: one engine step late
        (measured: 180 of the 300 ms of a hand-over with four requests in flight). All of it is complete when
        the metadata arrives, and what the writer causes is looked at only after `start_load_kv` has run.
        """
        for request_id in metadata.reqs_in_batch:
            self._started.put(request_id)
        for request_id in metadata.reqs_not_processed:
            self._ended.put(
                (request_id, *refused.get(request_id, ("cancel", "the request was aborted on P")))
            )
        for request_id, registration in metadata.push_registrations.items():
            self._reg_send_inbox.put((request_id, registration))
        self._for_readers |= for_readers
        with self._guard:
            self._held.update(metadata.push_finished_blocks)
        for request_id, block_ids in metadata.push_finished_blocks.items():
            self._finished_blocks_inbox.put((request_id, block_ids))
        if (
            metadata.push_registrations
            or metadata.push_finished_blocks
            or metadata.reqs_not_processed
            or metadata.reqs_in_batch
        ):
            metadata.push_registrations = {}
            metadata.push_finished_blocks = {}
            self._push_writer_wake.set()

    def cancel_send(self, request_id: str, error_class: ErrorClass, reason: str) -> None:
        """End one of P's transfers: D is told at once, and blocks that are being written stay held."""
        self._cancelled.put((request_id, error_class, reason))
        self._push_writer_wake.set()

    def send_drop(self, peer: Peer, request_id: str, prefill_request_id: str | None, reason: str) -> None:
        """Tell P that D wants no KV for a request for which it has not registered."""
        notification: PeerMessage | bytes = Drop(request_id, reason, prefill_request_id)
        self._outbox.put((peer, notification))
        self._push_writer_wake.set()

    # --- The writer thread ---------------------------------------------------------------------------------

    def _push_writer_loop(self) -> None:
        while not self._push_writer_stop.is_set():
            try:
                self._writer_pass()
            except Exception:
                logger.exception("the push writer met an error, and goes on")
            waits = self._sending_transfers or self._push_finished_blocks
            self._push_writer_wake.wait(POLL_S if waits else IDLE_POLL_S)
            self._push_writer_wake.clear()

    def _writer_pass(self) -> None:
        """Do all that there is to do now. What one request's error leaves undone is done in the next pass."""
        for request_id, registration in _drain(self._reg_send_inbox):
            self._send_registration_to_p(request_id, registration)
        self._refuse_what_ended()
        for request_id, error in _drain(self._handshakes_failed):
            self._after_failed_handshake(request_id, error)
        for request_id, blocks, registration in _drain(self._deferred_push_inbox):
            self._do_start_push_kv(request_id, blocks, registration)
        for request_id, blocks in _drain(self._finished_blocks_inbox):
            self._match_blocks(request_id, blocks)
        for request_id in _drain(self._evict_finished_inbox):
            self._push_finished_blocks.pop(request_id, None)
            self._pending_d_registrations.pop(request_id, None)
        for notifications in self.nixl_wrapper.get_new_notifs().values():
            for notification in notifications:
                self._handle_push_reg_notif(notification)
        for drop in _drain(self._drops):
            self._obey_drop(drop)
        if self._sending_transfers:
            self._poll_writes()
        for peer, message in _drain(self._outbox):
            self._send(peer, message)

    def _refuse_what_ended(self) -> None:
        for request_id in _drain(self._started):
            self._forget_refusal(request_id)
        for request_id, error_class, reason in _drain(self._ended):
            self._refuse(request_id, error_class, reason)
        for request_id, error_class, reason in _drain(self._cancelled):
            self._cancel(request_id, error_class, reason)

    def _match_blocks(self, request_id: str, blocks: Any) -> None:
        registration = self._pop_matching_registration(request_id)
        if registration is not None:
            self._do_start_push_kv(request_id, blocks, registration)
            return
        refusal = self._refusals.pop(get_base_request_id(request_id), None)
        if refusal is not None and refusal.by_decode:
            self._release(request_id)
            return
        self._push_finished_blocks[request_id] = blocks

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        try:
            data = msgspec.msgpack.decode(notif[len(PUSH_REG_NOTIF_PREFIX) :])
            registration = check_registration(data, len(self.kv_cache_config.transfer_groups))
        except (BadParameter, msgspec.DecodeError, RecursionError) as error:
            logger.warning("dropped a registration that cannot be obeyed: %s", error)
            return
        refusal = self._refusals.get(get_base_request_id(registration["request_id"]))
        if refusal is not None and not refusal.by_decode:
            self._tell_failed(registration, refusal.error_class, refusal.reason, settled=True)
            return
        super()._handle_push_reg_notif(notif)

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        decode_id = registration_data["request_id"]
        push = self._pushes.get(decode_id)
        if push is None:
            push = self._pushes[decode_id] = _Push(request_id, local_block_ids, registration_data)
            self._report_matched(push)
        if push.dropped:
            self._end_unposted(push, "cancel", "D wants it no more")
            return
        if self._awaits_handshake(push):
            return
        if request_id in self._for_readers and self._offer(push):
            return
        if (missing := self._beyond_end(registration_data)) is not None:
            self._end_unposted(push, "parameters", f"D registered block {missing}, which it has not")
            return
        if not self._begin_posting(request_id):
            self._end_unposted(push, "expiry", "the lease ended before P could write")
            return
        push.posted = True
        try:
            super()._do_start_push_kv(request_id, local_block_ids, registration_data)
        except Exception as error:
            logger.exception("the write for %s could not be posted", request_id)
            self._fail_posting(push, f"the write could not be posted: {error}")
        else:
            if request_id not in self._sending_transfers:
                self._fail_posting(push, "the write could not be posted")

    def _offer(self, push: _Push) -> bool:
        """Have D read what is meant to be read; return False where D is a stock peer, which is written to."""
        peer = peer_of(push.registration)
        with self._handshake_lock:
            agents = list(map(agent_name, (self._remote_agents.get(peer.engine_id) or {}).values()))
        if not all(map(is_kvtop_agent, agents)):
            return False
        decode_id = self._forget_push(push)
        self._push_finished_blocks[push.request_id] = push.blocks  # held until it is read, or dropped
        block_ids = [list(group) for group in self._as_grouped_block_ids(push.blocks)]
        self._tell(push.registration, Read(decode_id, push.request_id, block_ids, self.pull_port))
        return True

    def _beyond_end(self, registration: dict[str, Any]) -> int | None:
        """Return a block id that D registered and does not have, None if all are D's."""
        engine_id = registration["decode_engine_id"]
        info = self.transfer_topo.get_engine_info(engine_id)
        blocks = int(self.dst_num_blocks[engine_id]) // int(info.remote_physical_blocks_per_logical)
        return beyond(registration["local_block_ids"], blocks)

    def _awaits_handshake(self, push: _Push) -> bool:
        """Whether D must be met first; the push goes on when it has been, or is tried again."""
        pending = self._ensure_handshake(*handshake_arguments(peer_of(push.registration)))
        if pending is None:
            return False

        def when_known(future: Any) -> None:
            error = future.exception()
            if error is None:
                self._deferred_push_inbox.put((push.request_id, push.blocks, push.registration))
            else:
                self._handshakes_failed.put((push.request_id, error))
            self._push_writer_wake.set()

        pending.add_done_callback(when_known)
        return True

    def _report_matched(self, push: _Push) -> None:
        peer_engine_id = push.registration.get("decode_engine_id")
        self._telemetry.step(
            "prefill",
            push.request_id,
            "matched",
            "pull" if push.request_id in self._for_readers else "push",
            rank=self.tp_rank,
            peer_request_id=push.registration.get("request_id"),
            peer_engine_id=peer_engine_id,
            ranks_expected=self.world_size,
        )
        if peer_engine_id not in self._remote_agents:
            self._telemetry.step("prefill", push.request_id, "handshaking", None, rank=self.tp_rank)

    def _xfer_blocks_for_req(self, req_id: str, meta: Any) -> None:
        self._open(req_id, lambda: super(PushWorker, self)._xfer_blocks_for_req(req_id, meta))

    def _begin_posting(self, request_id: str) -> bool:
        """Claim held blocks for a write: from here on their lease does not end before the write does."""
        with self._guard:
            if request_id not in self._held:
                return False
            self._posting.add(request_id)
            return True

    def _fail_posting(self, push: _Push, reason: str) -> None:
        """End a push of which nothing is on the wire; its blocks stay held until the lease ends."""
        with self._guard:
            self._posting.discard(push.request_id)
        self._forget_push(push)
        self._tell_failed(push.registration, "transport", reason, settled=True)

    def _end_unposted(self, push: _Push, error_class: ErrorClass, reason: str) -> None:
        """End a push before anything was posted, and free its blocks."""
        decode_id = self._forget_push(push)
        if push.dropped:
            self._tell(push.registration, Settled(decode_id))
        else:
            self._tell_failed(push.registration, error_class, reason, settled=True)
        self._release(push.request_id)

    def _poll_writes(self) -> None:
        """See which writes are done. Seeing it is also what sends D the notification that it waits for."""
        with self._stats_guard:
            done, failed = super()._pop_done_transfers(self._sending_transfers)
        if not (done or failed):
            return
        by_request = {push.request_id: push for push in self._pushes.values()}
        for request_id in done:
            push = by_request.get(request_id)
            with self._guard:
                self._posting.discard(request_id)
            if push is None:
                continue
            decode_id = self._forget_push(push)
            if request_id in failed or request_id in self._send_failures:
                self._tell_failed(push.registration, "transport", "P's write failed", settled=True)
            elif push.dropped:
                self._telemetry.step("prefill", request_id, "settled", "push", rank=self.tp_rank)
                self._tell(push.registration, Settled(decode_id))
        self._send_failures.update(failed)
        self._written.put((done, failed))

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Poll D's side as upstream does; what P has written is polled by the writer alone."""
        if transfers is not self._sending_transfers:
            polled: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return polled
        done: set[str] = set()
        failed: set[str] = set()
        for some_done, some_failed in _drain(self._written):
            done |= some_done
            failed |= some_failed
        return done, failed

    # --- Refusing, dropping and telling, on the writer thread ---------------------------------------------

    def _refuse(self, request_id: str, error_class: ErrorClass, reason: str) -> None:
        """P will not write for this request: tell D now if it has registered, else when it does."""
        self._push_finished_blocks.pop(request_id, None)
        push = next((p for p in self._pushes.values() if p.request_id == request_id and not p.posted), None)
        registration = push.registration if push else self._pop_matching_registration(request_id)
        if push is not None:
            self._forget_push(push)
        if registration is not None:
            self._tell_failed(registration, error_class, reason, settled=True)
            return
        self._remember_refusal(request_id, _Refusal(time.monotonic(), error_class, reason, by_decode=False))

    def _cancel(self, request_id: str, error_class: ErrorClass, reason: str) -> None:
        """End one of P's transfers on the operator's word."""
        push = next((p for p in self._pushes.values() if p.request_id == request_id), None)
        if push is not None and push.posted:
            push.dropped = True
            self._telemetry.step(
                "prefill", request_id, "quarantined", "push", error_class=error_class, error=reason
            )
            self._tell_failed(push.registration, error_class, reason, settled=False)
            return
        with self._guard:
            held = request_id in self._held
        if request_id in self._for_readers:
            return  # a reader cannot be stopped from here: the lease ends, or D gives up
        self._refuse(request_id, error_class, reason)
        if held:
            self._telemetry.step(
                "prefill", request_id, "cancelled", None, error_class=error_class, error=reason
            )
            self._release(request_id)

    def _obey_drop(self, drop: Drop) -> None:
        """D wants no KV any more: nothing more is posted for it, and it is told when nothing can come."""
        push = self._pushes.get(drop.request_id)
        if push is not None and push.posted:
            push.dropped = True
            self._telemetry.step(
                "prefill",
                push.request_id,
                "quarantined",
                "push",
                error_class="cancel",
                error=f"D gave up ({drop.reason}) while P's write was on the wire",
            )
            return
        self._pending_d_registrations.pop(drop.request_id, None)
        if push is not None:
            push.dropped = True
            self._end_unposted(push, "cancel", drop.reason)
            return
        if drop.reply_to is not None:
            self._outbox.put((drop.reply_to, Settled(drop.request_id)))
        if drop.request_id in self._finished:
            return
        finished = self._pop_dropped_blocks(drop)
        if finished is None:
            refusal = _Refusal(time.monotonic(), "cancel", drop.reason, by_decode=True)
            self._remember_refusal(drop.prefill_request_id or drop.request_id, refusal)
        else:
            self._telemetry.step(
                "prefill",
                finished,
                "cancelled",
                None,
                error_class="cancel",
                error=f"D gave up: {drop.reason}",
            )
            self._release(finished)

    def _pop_dropped_blocks(self, drop: Drop) -> str | None:
        """Return P's request id of the finished blocks that a drop means, and let go of them."""
        match = self._pop_matching_finished_blocks(drop.prefill_request_id or drop.request_id)
        return match[0] if match else None

    def _remember_refusal(self, request_id: str, refusal: _Refusal) -> None:
        self._refusals[get_base_request_id(request_id)] = refusal
        while self._refusals and (
            len(self._refusals) > REMEMBERED
            or next(iter(self._refusals.values())).at_s < time.monotonic() - REFUSALS_KEPT_S
        ):
            self._refusals.popitem(last=False)

    def _forget_refusal(self, request_id: str) -> None:
        """Let a request begin (again) on P under an id of which an earlier one was refused."""
        base = get_base_request_id(request_id)
        refusal = self._refusals.get(base)
        if refusal is not None and not refusal.by_decode:
            del self._refusals[base]

    def _release(self, request_id: str) -> None:
        """Have the engine's thread free P's blocks of this request."""
        self._push_finished_blocks.pop(request_id, None)
        self._released.put(request_id)

    def _after_failed_handshake(self, request_id: str, error: BaseException) -> None:
        """Try again while the blocks are held: D cannot be told without a handshake."""
        push = next((p for p in self._pushes.values() if p.request_id == request_id), None)
        if push is None:
            return
        push.attempts += 1
        if timed_out(error) and push.attempts < HANDSHAKE_ATTEMPTS:
            self._do_start_push_kv(push.request_id, push.blocks, push.registration)
        else:
            self._log_failure(failure_type="push_handshake_failed", req_id=request_id, error=error)
            self._forget_push(push)

    def _forget_push(self, push: _Push) -> str:
        """Let go of a push that has ended; return D's request id."""
        decode_id: str = push.registration["request_id"]
        self._pushes.pop(decode_id, None)
        self._finished[decode_id] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        return decode_id

    def _tell_failed(
        self, registration: dict[str, Any], error_class: ErrorClass, reason: str, *, settled: bool
    ) -> None:
        self._tell(registration, Failed(registration["request_id"], error_class, reason, settled))

    def _tell(self, registration: dict[str, Any], message: PeerMessage) -> None:
        self._outbox.put((peer_of(registration), message))

    def _send(self, peer: Peer, message: PeerMessage | bytes) -> None:
        """Send to all ranks of a peer that this rank knows, after a handshake if need be."""
        pending = self._ensure_handshake(
            *handshake_arguments(peer), pp_size=peer.pp_size, notif_agents_only=isinstance(message, Drop)
        )
        if pending is not None:

            def when_known(future: Any) -> None:
                if future.exception() is None:
                    self._outbox.put((peer, message))
                    self._push_writer_wake.set()

            pending.add_done_callback(when_known)
            return
        with self._handshake_lock:
            agents = list(map(agent_name, (self._remote_agents.get(peer.engine_id) or {}).values()))
        for agent in agents:
            notification = message if isinstance(message, bytes) else encode(message)
            if not is_kvtop_agent(agent):
                if not isinstance(message, Drop) or message.prefill_request_id is None:
                    continue
                notification = f"{message.prefill_request_id}:{self.world_size}".encode()
            self._notify(agent, notification)

    def _notify(self, agent: str, notification: bytes) -> bool:
        try:
            self.nixl_wrapper.send_notif(agent, notif_msg=notification)
        except Exception as error:
            logger.info("could not notify %s: %s", agent, error)
            return False
        return True

    # --- D's registrations: sent on the writer thread ------------------------------------------------------

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        peer = Peer(
            reg_data["remote_engine_id"],
            reg_data["remote_host"],
            reg_data["remote_port"],
            reg_data["remote_tp_size"],
            reg_data.get("remote_pp_size", 1),
        )
        with self._handshake_lock:
            agents = set(map(agent_name, (self._remote_agents.get(peer.engine_id) or {}).values()))
        self._registered[req_id] = _Registered(peer, peer_of(reg_data), agents)
        super()._do_send_reg_notif(req_id, reg_data)
        self._telemetry.step("decode", req_id, "registered", None, rank=self.tp_rank)

    # --- After the forward pass, on the engine's thread ----------------------------------------------------

    def give_up(self, request_id: str, error_class: ErrorClass, reason: str) -> bool:
        """End D's wait for a push. Returns False where it has ended already."""
        if request_id not in self._recving_metadata:
            return False
        self.reasons[request_id] = (error_class, reason)
        self._failed_recv_reqs.put(request_id)
        return True

    def get_transfer_results(self) -> Any:
        """Return upstream's results; ask P to drop what failed on D, and settle what is known to be over."""
        self._shared.pump()
        self._hear_answers()
        self._filter_completions()
        results = super().get_transfer_results()
        for request_id in results.finished_recving - results.failed_recving:
            self._registered.pop(request_id, None)
            self.reasons.pop(request_id, None)
        for request_id in results.failed_recving:
            self._after_failure(request_id)
        self._free_released(results.finished_sending)
        with self._guard:
            self._held -= results.finished_sending
        self._for_readers -= results.finished_sending
        self._part_from_replaced()
        self._probe_unsettled()
        return results

    @contained
    def _free_released(self, finished_sending: set[str]) -> None:
        """Have what the writer has let go of freed, each once."""
        for request_id in _drain(self._released):
            if request_id in self._held and request_id not in finished_sending:
                self._reqs_to_send.pop(request_id, None)
                self._reqs_to_process.discard(request_id)
                finished_sending.add(request_id)

    @contained
    def _part_from_replaced(self) -> None:
        """End what waits for engines that came back as others, and forget them when nothing uses them."""
        for engine_id in list(self.replaced):
            for request_id, registered in list(self._registered.items()):
                if registered.peer.engine_id == engine_id:
                    registered.agents.clear()
                    self.give_up(request_id, "transport", "the peer came back as another engine")
            self._settle_all_of(engine_id)
            if self.evict(engine_id):
                self.replaced.remove(engine_id)

    def _settle_all_of(self, engine_id: str) -> None:
        for request_id in [r for r, each in self._unsettled.items() if each.peer.engine_id == engine_id]:
            self._settle(request_id, all_agents=True)

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        """Reclaim expired leases, but never of blocks that a write reads from.

        Upstream frees them under the write: what is put there next would reach D as this request's KV.
        """
        now = time.perf_counter()
        overdue = [each for each, deadline in self._reqs_to_send.items() if now >= deadline]
        if not overdue:
            return
        with self._guard:
            writing = self._posting & set(overdue)
            self._held.difference_update(set(overdue) - writing)
        for request_id in overdue:
            if request_id in writing:
                continue
            self.consumer_notification_counts_by_req.pop(request_id, None)
            self.expected_consumer_notifications_by_req.pop(request_id, None)
            self.xfer_stats.record_kv_expired_req()
            self._reqs_to_process.discard(request_id)
            del self._reqs_to_send[request_id]
            done_sending.add(request_id)
            self._report_expired(request_id)
            self._ended.put((request_id, "expiry", "P's lease ended before D's registration could be served"))

    @contained
    def _filter_completions(self) -> None:
        """Keep from upstream what would confuse it: reads of blocks that are not held, and late writes."""
        for notification in list(_drain(self._pending_completion_notifs)):
            request_id = notification.rpartition(b":")[0].decode("utf-8", "replace")
            if not is_completion(notification):
                logger.warning("dropped a notification that is none of ours (%d bytes)", len(notification))
            elif request_id in self._unsettled:
                self._late_write(request_id)
            elif request_id in self._reqs_to_process and request_id not in self._held:
                logger.warning("dropped a completion of a request that is still being computed")
            else:
                self._pending_completion_notifs.put(notification)

    @contained
    def _after_failure(self, request_id: str) -> None:
        """Ask P to drop a request of D's that failed; until P answers, its blocks are in quarantine."""
        error_class, reason = self.reasons.pop(request_id, ("transport", "the KV did not arrive on D"))
        self._telemetry.step(
            "decode", request_id, "failed", "push", error_class=error_class, error=reason, rank=self.tp_rank
        )
        registered = self._registered.pop(request_id, None)
        if registered is None or not registered.agents:
            self.settled[request_id] += 1
            return
        self._unsettled[request_id] = _Unsettled(registered.agents, registered.peer)
        drop = encode(Drop(request_id, reason, reply_to=registered.itself))
        for agent in registered.agents:
            if is_kvtop_agent(agent):
                self._notify(agent, drop)

    @contained
    def _hear_answers(self) -> None:
        """Take what P said about D's requests."""
        for agent, answer in _drain(self._answers):
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

    @contained
    def _probe_unsettled(self) -> None:
        """Settle what a peer can no longer write: it is gone, or a stock one whose lease is long over."""
        now = time.monotonic()
        for engine_id in {engine_id for engine_id, state in _drain(self._probes) if state == "gone"}:
            self._settle_all_of(engine_id)
        due = {}
        for request_id, each in list(self._unsettled.items()):
            if not any(map(is_kvtop_agent, each.agents)) and now - each.since_s > self.stock_lease_s:
                self._settle(request_id, all_agents=True)
            elif now - max(each.since_s, each.probed_s) > PROBE_S:
                each.probed_s = now
                due[each.peer.engine_id] = each.peer
        for peer in due.values():
            self._shared.probe(peer.engine_id, peer.host, peer.port, self._handle_probe)

    @property
    def stock_lease_s(self) -> float:
        """After how long a stock peer, which cannot answer, is taken to write no more, in seconds.

        Twice the lease that both are configured with: no heartbeat renews it once D has given up, and a write
        is not posted after its end.
        """
        return 3.0 * float(self._lease_extension)  # upstream: an extension is two thirds of the lease

    def _handle_probe(self, engine_id: str, probed: Probed) -> None:
        self._probes.put((engine_id, probed.state))
        if probed.state != "alive":
            self._note_pair(engine_id, "failed", probed.reason)

    def get_kv_connector_stats(self) -> Any:
        """Return upstream's statistics, to which the writer adds."""
        with self._stats_guard:
            return super().get_kv_connector_stats()

    def busy_with(self, engine_id: str) -> bool:
        """Whether a transfer with this peer is under way, or a handshake with any peer."""
        pushes = list(self._pushes.values())
        return super().busy_with(engine_id) or any(
            push.registration.get("decode_engine_id") == engine_id for push in pushes
        )

    def _take_peer_message(self, agent: str, notification: bytes) -> None:
        """Sort in a message of another kvtop connector. On whichever thread fetched it."""
        message = decode(notification)
        match message:
            case Drop():
                self._drops.put(message)
                self._push_writer_wake.set()
            case Failed() | Read() | Settled():
                self._answers.put((agent, message))
            case None:
                logger.warning("dropped a message of a kvtop peer that cannot be understood")


def peer_of(registration: dict[str, Any]) -> Peer:
    """Return where D's handshakes are served, from its registration."""
    return Peer(
        registration["decode_engine_id"],
        registration["decode_host"],
        registration["decode_port"],
        registration["decode_tp_size"],
    )


def handshake_arguments(peer: Peer) -> tuple[str, str, int, int]:
    """Return what upstream's `_ensure_handshake` takes first."""
    return peer.engine_id, peer.host, peer.port, peer.tp_size


def is_completion(notification: bytes) -> bool:
    """Whether a notification is one that upstream can read: a heartbeat, or `request_id:tp_size`.

    >>> is_completion(b"HB:a,b"), is_completion(b"cmpl-1:2"), is_completion(b"cmpl-1"), is_completion(b"a:0")
    (True, True, False, False)
    """
    return bool(re.fullmatch(rb"HB:.*|.+:[1-9]\d{0,4}", notification, re.DOTALL)) and _is_text(notification)


def _is_text(notification: bytes) -> bool:
    try:
        notification.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _drain(queue: Any) -> Any:
    """Yield what a queue holds now."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
