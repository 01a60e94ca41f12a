"""What vLLM calls on the scheduler's side of the connector: requests go to their half, steps to both.

P's finished blocks are always held by the push half, whichever way they are meant to go: a reader's
notification frees them as well as a write does, and a registration finds them, so that two sides which chose
differently during a switch still meet. What is ordered and waited for is in `control` and `inbound`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtop.agents.events import Side
from kvtop.connector.config import Settings
from kvtop.connector.contained import contained
from kvtop.connector.control import DRAINING_REASON, Control
from kvtop.connector.halves import (
    BothHandshakes,
    BothMetadata,
    TwoHalves,
    check_port,
    scheduler_halves,
)
from kvtop.connector.inbound import Inbound
from kvtop.connector.params import BadParameter, check, check_peer
from kvtop.connector.reuse import fitting, reads_back
from kvtop.connector.routing import Router
from kvtop.connector.upstream import EngineCoreLoop, finished_normally, init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvtop.scheduler_side")

REST_S: Final = 0.05
"""How long blocks that may be freed wait for it in an engine that has nothing else to do."""


class SchedulerSide(TwoHalves):
    """The scheduler's part of `KvtopConnector`."""

    def build_scheduler(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        """Build both halves, and what kvtop keeps beside them. Call it while the engine is being built."""
        self.push, self.pull = scheduler_halves(vllm_config, kv_cache_config, settings)
        puller = self.pull.connector_scheduler
        ranks = vllm_config.parallel_config.world_size
        self.reuses = bool(puller.is_bidirectional_kv_xfer_enabled and not puller.use_host_buffer)
        self.groups = kv_cache_config.transfer_groups
        self.block_size = int(vllm_config.cache_config.block_size)
        self.loop = EngineCoreLoop()
        self.router = Router(settings.mode)
        self.inbound = Inbound(deadline_s=settings.deadline_s, ranks=ranks)
        self.control = Control(self.router, self.inbound, self.telemetry, self.loop.wake, ranks=ranks)

    def _half(self, request: Request) -> Any:
        """Return the half that a request belongs to: on P the one that holds, on D that of its direction."""
        params = request.kv_transfer_params
        direction = self.router.direction(request.request_id, params)
        return self.push if params and params.get("do_remote_decode") else self.halves[direction]

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool in which blocks are kept from reuse."""
        self.inbound.block_pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """Check the request's parameters and fix its direction; on D, begin its row in the ledger."""
        if request.kv_transfer_params is not None:
            self._check(request)
        self._half(request).on_new_request(request)
        if _receives(request) or reads_back(request.kv_transfer_params):
            self._report(request, "decode", "queued")

    def _check(self, request: Request) -> None:
        """Have a request whose parameters cannot be obeyed computed here."""
        try:
            request.kv_transfer_params = check(request.kv_transfer_params, len(self.groups), self.engine_id)
            self._check_reuse(request)
        except BadParameter as error:
            logger.warning("%s: %s; the request is computed locally", request.request_id, error)
            sends = isinstance(request.kv_transfer_params, dict) and request.kv_transfer_params.get(
                "do_remote_decode"
            )
            request.kv_transfer_params = None
            side: Side = "prefill" if sends else "decode"
            self.telemetry.step(
                side, request.request_id, "failed", None, error_class="parameters", error=str(error)
            )

    def _check_reuse(self, request: Request) -> None:
        """Let a request on P read back only what it can; the rest is computed here."""
        params = request.kv_transfer_params
        if not reads_back(params):
            return
        blocks: list[list[int]] = []
        if self.reuses and not self.control.draining:
            try:
                check_peer(params, self.engine_id)
            except BadParameter as error:
                logger.warning("%s: %s; nothing is read back", request.request_id, error)
            else:
                held, wanted = params.get("remote_num_tokens") or 0, request.num_prompt_tokens
                blocks = fitting(params["remote_block_ids"], held, wanted, self.block_size)
        params["remote_block_ids"] = blocks

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask the request's half how many tokens will come from the peer: none while D drains."""
        if self.control.draining and _receives(request):
            self._decline(request, "D drains")
            return 0, False
        half = self.pull if reads_back(request.kv_transfer_params) else self._half(request)
        answer: tuple[int | None, bool] = half.get_num_new_matched_tokens(request, num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Tell the request's half which blocks it got."""
        receives = _receives(request)
        direction = self.router.direction(request.request_id, request.kv_transfer_params)
        if reads_back(request.kv_transfer_params):
            receives, direction = True, "pull"
            self.pull.update_state_after_alloc(request, blocks, num_external_tokens)
            self.pull.connector_scheduler._reqs_in_batch.discard(request.request_id)  # push holds it
        self._half(request).update_state_after_alloc(request, blocks, num_external_tokens)
        if receives and num_external_tokens > 0:
            self.inbound.expect(request.request_id, direction, _written_to(blocks))
            self.control.report()  # the workers may have nothing to say for as long as it waits
            self._report(request, "decode", "allocated")
        elif receives:
            self._report(request, "decode", "skipped")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End the request in its half; see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request in its half: whether P holds the blocks, and what D needs to know."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            answer = self._finish_prefill(request, block_ids)
        else:
            answer = self._finish_decode(request, block_ids)
        self.router.forget(request.request_id)
        return answer

    def _finish_prefill(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._stop_waiting(request)
        if self.control.draining and finished_normally(request):
            self.control.refuse(request_id, "cancel", DRAINING_REASON)
            self.push.connector_scheduler._reqs_not_processed.add(request_id)
            self._report(
                request, "prefill", "cancelled", error_class="cancel", error="P drains: D computes the prompt"
            )
            return False, None
        held: bool
        answer: dict[str, Any] | None
        held, answer = self.push.request_finished_all_groups(request, block_ids)
        if held and answer is not None:
            direction = self.router.direction(request_id, request.kv_transfer_params)
            self.control.held[request_id] = direction
            if direction == "pull":
                self.control.hold_for_reader(request_id)
                scheduler = self.push.connector_scheduler
                answer["transfer_mode"] = "pull"
                answer["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request_id]
                answer["remote_port"] = self.pull.connector_scheduler.side_channel_port
            self._report(
                request,
                "prefill",
                "queued",
                blocks=sum(len(group) for group in block_ids),
                lease_s=float(self.push.connector_scheduler._kv_lease_duration),
            )
        return held, answer

    def _finish_decode(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if _receives(request):  # it ended before its blocks were allocated
            self._decline(request, "the request ended on D before its KV was asked for")
        else:
            self._stop_waiting(request)
        answer: tuple[bool, dict[str, Any] | None] = False, None
        if self.router.known(request.request_id) == "push":
            answer = self.push.request_finished_all_groups(request, block_ids)
        if self.reuses and self.control.draining:
            self.pull.connector_scheduler._stop_heartbeat(request.request_id)
        elif self.reuses or self.router.known(request.request_id) == "pull":
            answer = self.pull.request_finished_all_groups(request, block_ids)
        if answer[0] and answer[1] is not None:
            self._hold_for_reuse(request, block_ids, answer[1])
        return answer

    def _hold_for_reuse(
        self, request: Request, block_ids: tuple[list[int], ...], answer: dict[str, Any]
    ) -> None:
        """Keep on D what it has computed, for the prefill of the next turn, whatever way that hands over."""
        scheduler = self.pull.connector_scheduler
        scheduler._reqs_in_batch.add(request.request_id)
        self.control.held[request.request_id] = "pull"
        del answer["transfer_mode"]
        self.telemetry.step(
            "prefill",
            request.request_id,
            "queued",
            "pull",
            blocks=sum(len(group) for group in block_ids),
            lease_s=float(scheduler.decoder_kv_blocks_ttl),
        )

    def _stop_waiting(self, request: Request) -> None:
        """Want no KV any more for a request that has ended while it waited."""
        if self.control.give_up(request.request_id, "cancel", "the request ended before its KV came"):
            self._report(request, "decode", "cancelled", error_class="cancel", error="the request ended")

    def _decline(self, request: Request, reason: str) -> None:
        """D computes locally what P holds: tell P, which frees its blocks."""
        params = request.kv_transfer_params
        assert params is not None
        if self.router.direction(request.request_id, params) == "pull":
            self.pull.connector_scheduler._reqs_need_recv[request.request_id] = (request, [], (), False)
        else:
            self.control.decline(request.request_id, params, reason)
        params["do_remote_prefill"] = False
        self._report(
            request, "decode", "cancelled", error_class="cancel", error=f"computed locally: {reason}"
        )

    def _report(self, request: Request, side: Any, step: Any, **facts: Any) -> None:
        params = request.kv_transfer_params or {}
        direction = self.router.direction(request.request_id, params)
        if side == "decode":
            direction = "pull" if params.get("do_remote_decode") else direction
            facts["peer_request_id"] = _text(params.get("remote_request_id"))
            facts["peer_engine_id"] = _text(params.get("remote_engine_id"))
        self.telemetry.step(side, request.request_id, step, direction, **facts)

    def build_connector_meta(self, scheduler_output: Any) -> BothMetadata:
        """Collect both halves' work for this engine step, and what kvtop adds."""
        if not (scheduler_output.total_num_scheduled_tokens or scheduler_output.finished_req_ids):
            self._rest()
        tasks = self.control.next_tasks()
        return BothMetadata(
            self.push.build_connector_meta(scheduler_output),
            self.pull.build_connector_meta(scheduler_output),
            tasks,
        )

    @contained
    def _rest(self) -> None:
        """Rest while there is nothing to do but hold blocks: for a reader, under a write, in quarantine.

        vLLM has such an engine step without pause, to see once a step whether it may free them (measured on
        CPU: half a core, and with two ranks two more, taken from the peer that it waits for).
        """
        if not (self.control.is_urgent or self.inbound.awaited):
            self.loop.rest(REST_S)

    def update_connector_output(self, connector_output: Any) -> None:
        """Tell both halves what the workers finished, and report it."""
        self.control.hear(connector_output.kv_connector_worker_meta)
        for request_id in connector_output.finished_recving or ():
            awaited = self.inbound.awaited.get(request_id)
            direction = awaited.direction if awaited else None
            if request_id not in connector_output.failed_recving:
                self.inbound.arrived(request_id)
                self.telemetry.step("decode", request_id, "received", direction)
            elif self.inbound.failed(request_id):
                self.telemetry.step("decode", request_id, "quarantined", direction)
        for half in self.halves.values():
            half.update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self.telemetry.step("prefill", request_id, "released", self.control.held.pop(request_id, None))
        self.control.report()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although no request is scheduled."""
        return self.control.has_work or any(half.has_pending_push_work() for half in self.halves.values())

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


def _receives(request: Request) -> bool:
    """Whether a request still asks for KV from P."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def _written_to(blocks: Any) -> list[Any]:
    """Return the blocks of an allocation that KV is written to: those that hold no cached prefix."""
    return [
        block for group in blocks.blocks for block in group if block.block_hash is None and not block.is_null
    ]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
