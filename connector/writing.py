"""P's side of a push, on the writer thread: match, post, poll, refuse and drop.

Upstream's writer thread owns what is matched and posted; kvtop's polls what it has posted too, so that D is
told at once, and answers every registration: with a write, an offer to read, or why nothing will come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from kvtop.agents.events import ErrorClass
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.observed import timed_out
from kvtop.connector.outbox import Outbox, drain, handshake_arguments, peer_of
from kvtop.connector.params import BadParameter, beyond, check_registration
from kvtop.connector.peer_messages import Drop, Read, Settled, is_kvtop_agent
from kvtop.connector.refusals import Refusal, Refusals
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import PUSH_REG_NOTIF_PREFIX, get_base_request_id, init_logger

logger = init_logger("vllm.kvtop.writing")

POLL_S: Final = 0.001
"""How often the writer looks after writes on the wire, and for registrations that its blocks wait for."""
IDLE_POLL_S: Final = 0.05
"""How often it looks for messages while there is nothing to do: an idle engine does not step, and NIXL wakes
nobody. A D that asks an idle P must not wait for the next request there."""
HANDSHAKE_ATTEMPTS: Final = 3
REMEMBERED: Final = 4096
"""How many ended pushes are remembered for messages that are still to come."""


@dataclass
class Push:
    """One transfer on P, from its match to its end. Owned by the writer."""

    request_id: str
    blocks: Any
    registration: dict[str, Any]
    attempts: int = 0
    posted: bool = False
    dropped: bool = False
    """Whether D wants to be told once nothing can be written any more."""


class Writing(Outbox):
    """The writer thread's work on P."""

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self._guard = threading.Lock()
        self._stats_guard = threading.Lock()
        self._held: set[str] = set()  # under the guard: finished blocks that are P's to give
        self._posting: set[str] = set()  # under the guard: held, and being written or about to be
        self._for_readers: set[str] = set()  # held, and perhaps being read at this moment
        self._pushes: dict[str, Push] = {}  # by D's request id
        self._finished: OrderedDict[str, None] = OrderedDict()  # D's ids of the latest pushes that ended
        self._refusals = Refusals()
        self._started: SimpleQueue[str] = SimpleQueue()
        self._ended: SimpleQueue[tuple[str, ErrorClass, str]] = SimpleQueue()
        self._cancelled: SimpleQueue[tuple[str, ErrorClass, str]] = SimpleQueue()
        self._drops: SimpleQueue[Drop] = SimpleQueue()
        self._handshakes_failed: SimpleQueue[tuple[str, BaseException]] = SimpleQueue()
        self._written: SimpleQueue[tuple[set[str], set[str]]] = SimpleQueue()
        self._released: SimpleQueue[str] = SimpleQueue()
        self.pull_port = 0
        """Where this engine's pull half serves handshakes."""

    @property
    def writes(self) -> int:
        """How many requests have writes on the wire."""
        return len(self._sending_transfers)

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
        for request_id, registration in drain(self._reg_send_inbox):
            self._send_registration_to_p(request_id, registration)
        self._refuse_what_ended()
        for request_id, error in drain(self._handshakes_failed):
            self._after_failed_handshake(request_id, error)
        for request_id, blocks, registration in drain(self._deferred_push_inbox):
            self._do_start_push_kv(request_id, blocks, registration)
        for request_id, blocks in drain(self._finished_blocks_inbox):
            self._match_blocks(request_id, blocks)
        for request_id in drain(self._evict_finished_inbox):
            self._push_finished_blocks.pop(request_id, None)
            self._pending_d_registrations.pop(request_id, None)
        for notifications in self.nixl_wrapper.get_new_notifs().values():
            for notification in notifications:
                self._handle_push_reg_notif(notification)
        for drop in drain(self._drops):
            self._obey_drop(drop)
        if self._sending_transfers:
            self._poll_writes()
        self.send_outbox()

    def _refuse_what_ended(self) -> None:
        for request_id in drain(self._started):
            self._refusals.begin(get_base_request_id(request_id))
        for request_id, error_class, reason in drain(self._ended):
            self._refuse(request_id, error_class, reason)
        for request_id, error_class, reason in drain(self._cancelled):
            self._cancel(request_id, error_class, reason)

    def _match_blocks(self, request_id: str, blocks: Any) -> None:
        registration = self._pop_matching_registration(request_id)
        if registration is not None:
            self._do_start_push_kv(request_id, blocks, registration)
            return
        if self._refusals.take_of_decode(get_base_request_id(request_id)):
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
        decode_id = registration["request_id"]
        if decode_id in self._pushes or decode_id in self._finished:
            return  # each rank of D registers, and all are written to at once
        refusal = self._refusals.of_prefill(get_base_request_id(decode_id))
        if refusal is not None:
            self._tell_failed(registration, refusal.error_class, refusal.reason, settled=True)
            return
        super()._handle_push_reg_notif(notif)

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        decode_id = registration_data["request_id"]
        if decode_id in self._finished:
            return  # ended, and D told so, while its handshake was under way
        push = self._pushes.get(decode_id)
        if push is None:
            push = self._pushes[decode_id] = Push(request_id, local_block_ids, registration_data)
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

    def _offer(self, push: Push) -> bool:
        """Have D read what is meant to be read; return False where D is a stock peer, which is written to."""
        agents = self.agents_of(push.registration["decode_engine_id"])
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

    def _awaits_handshake(self, push: Push) -> bool:
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

    def _report_matched(self, push: Push) -> None:
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
        self._open(req_id, lambda: super(Writing, self)._xfer_blocks_for_req(req_id, meta))

    def _begin_posting(self, request_id: str) -> bool:
        """Claim held blocks for a write: from here on their lease does not end before the write does."""
        with self._guard:
            if request_id not in self._held:
                return False
            self._posting.add(request_id)
            return True

    def _fail_posting(self, push: Push, reason: str) -> None:
        """End a push of which nothing is on the wire, and free its blocks."""
        with self._guard:
            self._posting.discard(push.request_id)
        self._end_unposted(push, "transport", reason)

    def _end_unposted(self, push: Push, error_class: ErrorClass, reason: str) -> None:
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
        refusal = Refusal(error_class, reason, by_decode=False)
        self._refusals.remember(get_base_request_id(request_id), refusal)

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
            base_id = get_base_request_id(drop.prefill_request_id or drop.request_id)
            self._refusals.remember(base_id, Refusal("cancel", drop.reason, by_decode=True))
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

    def _release(self, request_id: str) -> None:
        """Let go of P's blocks of this request: from here on nothing is posted, and the engine frees them."""
        self._push_finished_blocks.pop(request_id, None)
        with self._guard:
            if request_id not in self._held:
                return
            self._held.discard(request_id)
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

    def _forget_push(self, push: Push) -> str:
        """Let go of a push that has ended; return D's request id."""
        decode_id: str = push.registration["request_id"]
        self._pushes.pop(decode_id, None)
        self._finished[decode_id] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        return decode_id
