"""Upstream's push worker: on P it writes, on D it registers and waits.

Added to upstream: work reaches the writer thread before the forward pass; a write is never posted, nor its
blocks freed, out of step with P's lease; and both sides tell each other when a transfer will not come
(`kvtop.connector.peer_messages`). P's blocks are held here for readers too, so that a peer may register for
blocks that were meant to be read, and is served.

Who may touch what: the writer thread owns what is matched, posted and refused (`writing`); the engine's
thread owns leases and what D waits for (`awaiting`). Between them there are only queues, and the set of held
blocks under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvtop.agents.events import ErrorClass
from kvtop.connector.awaiting import Awaiting
from kvtop.connector.contained import contained
from kvtop.connector.nixl_agent import SharedNixlAgent, is_completion
from kvtop.connector.outbox import drain
from kvtop.connector.peer_messages import Drop, Failed, Peer, Read, Settled, decode
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import init_logger
from kvtop.connector.writing import Writing

logger = init_logger("vllm.kvtop.push_worker")


class PushWorker(Writing, Awaiting):
    """P's writes and D's registrations, observed; each can be refused, dropped and given up."""

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self.nixl_wrapper.on_arrival = self._push_writer_wake.set
        self.nixl_wrapper.on_peer_message = self._take_peer_message
        self.nixl_wrapper.on_completion = self._pending_completion_notifs.put

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
        self._outbox.put((peer, Drop(request_id, reason, prefill_request_id)))
        self._push_writer_wake.set()

    def get_transfer_results(self) -> Any:
        """Return upstream's results; ask P to drop what failed on D, and settle what is known to be over."""
        self._shared.pump()
        self._hear_answers()
        self._filter_completions()
        results = super().get_transfer_results()
        for request_id in results.finished_recving - results.failed_recving:
            self._registered.pop(request_id, None)
            self._reasons.pop(request_id, None)
        for request_id in results.failed_recving:
            self._after_failure(request_id)
        self._free_released(results.finished_sending)
        with self._guard:
            self._held -= results.finished_sending
        self._for_readers -= results.finished_sending
        self._part_from_replaced()
        self._look_after_peers()
        return results

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Poll D's side as upstream does; what P has written is polled by the writer alone."""
        if transfers is not self._sending_transfers:
            polled: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return polled
        done: set[str] = set()
        failed: set[str] = set()
        for some_done, some_failed in drain(self._written):
            done |= some_done
            failed |= some_failed
        return done, failed

    @contained
    def _free_released(self, finished_sending: set[str]) -> None:
        """Have what the writer has let go of freed, each once."""
        for request_id in drain(self._released):
            if request_id in self._reqs_to_send or request_id in self._reqs_to_process:
                self._reqs_to_send.pop(request_id, None)
                self._reqs_to_process.discard(request_id)
                finished_sending.add(request_id)

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
        for notification in list(drain(self._pending_completion_notifs)):
            request_id = notification.rpartition(b":")[0].decode("utf-8", "replace")
            if not is_completion(notification, self.world_size):
                logger.warning("dropped a notification that is none of ours (%d bytes)", len(notification))
            elif request_id in self._unsettled:
                self._late_write(request_id)
            elif request_id in self._reqs_to_process and request_id not in self._held:
                logger.warning("dropped a completion of a request that is still being computed")
            else:
                self._pending_completion_notifs.put(notification)

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
