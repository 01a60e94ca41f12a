"""The connector that vLLM loads: upstream's push and pull connectors side by side, one chosen per request.

A stock peer works with it, since each half handshakes in its own mode. kvtop adds to upstream: one NIXL
agent for both halves, the choice per request, reports to the node agent, and an earlier hand-over of push
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtop.agents.events import Direction
from kvtop.connector.config import read_settings
from kvtop.connector.halves import (
    BothHandshakes,
    BothMetadata,
    check_port,
    scheduler_halves,
    worker_halves,
)
from kvtop.connector.routing import Router
from kvtop.connector.telemetry import Telemetry, telemetry_for
from kvtop.connector.upstream import KVConnectorRole, KVConnectorTransferResults, NixlBaseConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class KvtopConnector(NixlBaseConnector):
    """vLLM's `kv_connector`; load it with `"kv_connector_module_path": "kvtop.connector"`."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        """Build both halves for one role.

        Raises:
            SettingError: a `kvtop_*` key of `kv_connector_extra_config` is unknown or impossible.
            ValueError: decode context parallelism, which upstream's push cannot serve.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError(
                "KvtopConnector does not support decode_context_parallel_size > 1: vLLM's push half cannot"
            )
        self.settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.telemetry: Telemetry = telemetry_for(vllm_config, self.settings)
        self.router = Router(self.settings.mode)
        self._awaiting_kv: set[str] = set()  # D's requests whose row in the ledger is still open
        if role == KVConnectorRole.SCHEDULER:
            self.push, self.pull = scheduler_halves(vllm_config, kv_cache_config, self.settings)
        else:
            self.push, self.pull = worker_halves(vllm_config, kv_cache_config, self.settings, self.telemetry)
        self.halves: Mapping[Direction, Any] = {"push": self.push, "pull": self.pull}

    # Scheduler side: requests go to their half, steps to both.

    def _half(self, request: Request) -> Any:
        return self.halves[self.router.direction(request.request_id, request.kv_transfer_params)]

    def on_new_request(self, request: Request) -> None:
        """Fix the request's direction; on D, begin its row in the ledger."""
        self._half(request).on_new_request(request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self._awaiting_kv.add(request.request_id)
            self._report(request, "decode", "queued")

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask the request's half how many tokens will come from the peer."""
        answer: tuple[int | None, bool] = self._half(request).get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Tell the request's half which blocks it got."""
        params = request.kv_transfer_params
        receives = bool(params and params.get("do_remote_prefill"))
        self._half(request).update_state_after_alloc(request, blocks, num_external_tokens)
        if receives and num_external_tokens > 0:
            self._report(request, "decode", "allocated")
        elif receives:
            self._awaiting_kv.discard(request.request_id)
            self._report(request, "decode", "skipped")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End the request in its half; see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request in its half: whether P holds the blocks, and what D needs to know."""
        half = self._half(request)
        answer: tuple[bool, dict[str, Any] | None] = half.request_finished_all_groups(request, block_ids)
        held = answer[0]
        if held:
            self._report(
                request,
                "prefill",
                "queued",
                blocks=sum(len(group) for group in block_ids),
                lease_s=float(half.connector_scheduler._kv_lease_duration),
            )
        if request.request_id in self._awaiting_kv:
            self._awaiting_kv.discard(request.request_id)
            error = "the request ended on D before its KV had arrived"
            self._report(request, "decode", "cancelled", error_class="cancel", error=error)
        self.router.forget(request.request_id)
        return answer

    def _report(self, request: Request, side: Any, step: Any, **facts: Any) -> None:
        params = request.kv_transfer_params or {}
        direction = self.router.direction(request.request_id, params)
        if side == "decode":
            facts["peer_request_id"] = _text(params.get("remote_request_id"))
            facts["peer_engine_id"] = _text(params.get("remote_engine_id"))
        self.telemetry.step(side, request.request_id, step, direction, **facts)

    def build_connector_meta(self, scheduler_output: Any) -> BothMetadata:
        """Collect both halves' work for this engine step."""
        return BothMetadata(
            self.push.build_connector_meta(scheduler_output),
            self.pull.build_connector_meta(scheduler_output),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Tell both halves what the workers finished, and report it."""
        for half in self.halves.values():
            half.update_connector_output(connector_output)
        failed = connector_output.failed_recving
        for request_id in connector_output.finished_recving or ():
            direction = self.router.known(request_id)
            self._awaiting_kv.discard(request_id)
            if request_id in failed:
                self.telemetry.step(
                    "decode", request_id, "failed", direction, error="the KV did not arrive on D"
                )
            else:
                self.telemetry.step("decode", request_id, "received", direction)
        for request_id in connector_output.finished_sending or ():
            self.telemetry.step("prefill", request_id, "released", self.router.known(request_id))

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping for transfers although no request is scheduled."""
        return any(half.has_pending_push_work() for half in self.halves.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], BothHandshakes]) -> None:
        """Serve each half's handshakes on its own port.

        Raises:
            PortInUseError: one of the two ports is taken (upstream would wait for ever).
        """
        for direction, half in self.halves.items():
            scheduler = half.connector_scheduler
            check_port(scheduler.side_channel_host, scheduler.side_channel_port, direction)
            half.set_xfer_handshake_metadata_pp_aware(
                {rank: getattr(both, direction) for rank, both in metadata.items()}
            )

    # Worker side: steps go to both halves.

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
        self.push.connector_worker.hand_over(connector_metadata.push)

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
        return KVConnectorTransferResults(
            finished_sending=push.finished_sending | pull.finished_sending,
            finished_recving=push.finished_recving | pull.finished_recving,
            failed_recving=push.failed_recving | pull.failed_recving,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of D that either half failed to fill."""
        push, pull = (half.get_block_ids_with_load_errors() for half in self.halves.values())
        failed: set[int] = push | pull
        return failed

    def get_kv_connector_stats(self) -> Any:
        """Return both halves' transfer statistics as one, or None where there is nothing new."""
        if self.role == KVConnectorRole.SCHEDULER:
            return None
        push, pull = (half.get_kv_connector_stats() for half in self.halves.values())
        return push.aggregate(pull) if push and pull else push or pull

    def get_handshake_metadata(self) -> BothHandshakes:
        """Return what peers need for a handshake with either half."""
        return BothHandshakes(self.push.get_handshake_metadata(), self.pull.get_handshake_metadata())

    def shutdown(self) -> None:
        """Stop both halves, and say so to the agent."""
        for half in self.halves.values():
            half.shutdown()
        self.telemetry.close()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
