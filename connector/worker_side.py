"""What vLLM calls on a worker's side of the connector: steps go to both halves.

What the halves' workers do beyond upstream's is in `push_worker` and `pull_worker`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvtop.connector.config import Settings
from kvtop.connector.halves import (
    BothHandshakes,
    BothMetadata,
    Tasks,
    TwoHalves,
    WorkerReport,
    worker_halves,
)
from kvtop.connector.upstream import KVConnectorTransferResults

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerSide(TwoHalves):
    """A worker's part of `KvtopConnector`."""

    def build_worker(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        """Build both halves on one NIXL agent."""
        self.push, self.pull = worker_halves(vllm_config, kv_cache_config, settings, self.telemetry)
        self._told = (0, 0)
        self._evictions: Counter[tuple[int, bool]] = Counter()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the KV cache, once for both halves."""
        for half in self.halves.values():
            half.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Pass on how blocks are copied between device and host."""
        for half in self.halves.values():
            half.set_host_xfer_buffer_ops(copy_operation)

    def bind_connector_metadata(self, connector_metadata: BothMetadata) -> None:
        """Take this step's work, and hand push's to its writer before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self.push.bind_connector_metadata(connector_metadata.push)
        self.pull.bind_connector_metadata(connector_metadata.pull)
        tasks = connector_metadata.tasks
        self.push.connector_worker.hand_over(connector_metadata.push, tasks.refused, tasks.for_readers)
        if tasks:
            self._do(tasks)

    def _do(self, tasks: Tasks) -> None:
        """Do what the scheduler side wants beyond upstream's work."""
        push, pull = self.push.connector_worker, self.pull.connector_worker
        for request_id, (error_class, reason) in tasks.give_ups.items():
            push.give_up(request_id, error_class, reason) or pull.give_up(request_id, error_class, reason)
        for request_id, (error_class, reason) in tasks.cancels.items():
            push.cancel_send(request_id, error_class, reason)
        for peer, request_id, prefill_request_id, reason in tasks.unwanted:
            push.send_drop(peer, request_id, prefill_request_id, reason)
        for order_id, engine_id in tasks.evictions.items():
            left = [worker for worker in (push, pull) if not worker.evict(engine_id)]
            self._evictions[order_id, not left] += 1

    def clear_connector_metadata(self) -> None:
        """Let this step's work go."""
        super().clear_connector_metadata()
        for half in self.halves.values():
            half.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's transfers."""
        for half in self.halves.values():
            half.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Save what must be saved before the step ends."""
        for half in self.halves.values():
            half.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests that finished sending and receiving, in vLLM's older form."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what both halves finished since the last step."""
        push, pull = (half.get_transfer_results(finished_req_ids) for half in self.halves.values())
        results = KVConnectorTransferResults(
            finished_sending=push.finished_sending | pull.finished_sending,
            finished_recving=push.finished_recving | pull.finished_recving,
            failed_recving=push.failed_recving | pull.failed_recving,
        )
        if self._vllm_config.parallel_config.world_size > 1:  # it may fail yet on another rank
            self.push.connector_worker.settled.update(results.finished_recving - results.failed_recving)
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return what the scheduler side must know, or None where there is no news."""
        push, pull = self.push.connector_worker, self.pull.connector_worker
        wire = (push.writes, pull.reads)
        news = (push.settled, pull.settled, push.pairs, pull.pairs, self._evictions)
        if wire == self._told and not any(news):
            return None
        self._told = wire
        settled = push.settled + pull.settled
        push.settled, pull.settled = Counter(), Counter()
        # A handshake thread may add news: it goes into the new table, and is told after the next step.
        (of_push, push.pairs), (of_pull, pull.pairs) = (push.pairs, {}), (pull.pairs, {})
        evictions, self._evictions = self._evictions, Counter()
        return WorkerReport(settled, *wire, {**of_pull, **of_push}, evictions)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of D that either half failed to fill."""
        push, pull = (half.get_block_ids_with_load_errors() for half in self.halves.values())
        failed: set[int] = push | pull
        return failed

    def get_handshake_metadata(self) -> BothHandshakes:
        """Return what peers need for a handshake with either half."""
        return BothHandshakes(self.push.get_handshake_metadata(), self.pull.get_handshake_metadata())
