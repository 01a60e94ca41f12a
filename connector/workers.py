"""Upstream's push and pull workers, observed, and sharing one NIXL agent.

Each override calls upstream's method once, with what it was given, and returns what it returned; reports
are made beside it and never raise. Two things are changed on purpose: where the NIXL agent comes from, and
when new work reaches the push writer (`PushWorker.hand_over`).
"""

from __future__ import annotations

import time
from typing import Any, Final

from kvtop.agents.events import Direction, ErrorClass, Side
from kvtop.connector.nixl_agent import HalfAgent, SharedNixlAgent
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import NixlPullConnectorWorker, NixlPushConnectorWorker

FAILURES: Final[dict[str, tuple[Side, ErrorClass]]] = {
    "handshake_failed": ("decode", "handshake"),
    "push_reg_handshake_failed": ("decode", "handshake"),
    "push_handshake_failed": ("prefill", "handshake"),
}
"""Upstream's failure types that end a transfer before anything is posted: who reports each, and its class."""

WIRE_FAILURES: Final = ("transfer_setup_failed", "transfer_failed", "transfer_exception")
"""Upstream's failure types of the initiator's own NIXL transfers."""


class _Observed:
    """What both workers report alike. Mixed in before upstream's worker class."""

    direction: Direction
    initiator: Side
    """The side that posts the transfers in this direction, and alone can measure them."""

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take the shared agent's callbacks and handshake thread. Called once, right after construction."""
        worker: Any = self
        self._telemetry = telemetry
        self._made_for: dict[Any, str] = {}
        self._measured: dict[str, list[Any]] = {}
        self._opening: str | None = None
        self._opened = False
        agent: HalfAgent = worker.nixl_wrapper
        agent.on_made = self._handle_made
        agent.on_measured = self._handle_measured
        agent.on_released = self._handle_released
        worker._handshake_initiation_executor.shutdown(wait=False)
        worker._handshake_initiation_executor = shared.handshakes

    def _handle_made(self, handle: Any) -> None:
        if self._opening is not None:
            self._made_for[handle] = self._opening
            self._opened = True

    def _handle_measured(self, handle: Any, telemetry: Any) -> None:
        request_id = self._made_for.get(handle)
        if request_id is not None and telemetry is not None:
            self._measured.setdefault(request_id, []).append(telemetry)

    def _handle_released(self, handle: Any) -> None:
        self._made_for.pop(handle, None)

    def _open(self, request_id: str, transfer: Any) -> None:
        """Run upstream's `transfer()`, attributing the NIXL handles that it makes to the request."""
        worker: Any = self
        rank, ranks = worker.tp_rank, worker.world_size
        self._telemetry.step(
            self.initiator, request_id, "posting", self.direction, rank=rank, ranks_expected=ranks
        )
        self._opening, self._opened = request_id, False
        try:
            transfer()
        finally:
            self._opening = None
        if self._opened:
            self._telemetry.step(
                self.initiator, request_id, "on_wire", self.direction, rank=rank, ranks_expected=ranks
            )

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)  # type: ignore[misc]
        worker: Any = self
        for request_id in done:
            figures = self._measured.pop(request_id, None)
            if figures and request_id not in failed and not self._failed_before(request_id):
                self._telemetry.done(
                    self.initiator,
                    request_id,
                    self.direction,
                    rank=worker.tp_rank,
                    ranks_expected=worker.world_size,
                    figures=figures,
                )
        return done, failed

    def _failed_before(self, request_id: str) -> bool:
        """Whether one of the request's transfers was seen to fail at an earlier poll."""
        worker: Any = self
        return request_id in worker._recv_failures or request_id in getattr(worker, "_send_failures", ())

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)  # type: ignore[misc]
        for request_id in done_sending - before:
            self._telemetry.step(
                "prefill",
                request_id,
                "expired",
                self.direction,
                error_class="expiry",
                error="the lease ended before the KV was fetched; P's blocks are free again",
            )

    def _handle_heartbeat(self, payload: str) -> None:
        super()._handle_heartbeat(payload)  # type: ignore[misc]
        worker: Any = self
        for request_id in payload.split(","):
            deadline_s = worker._reqs_to_send.get(request_id)
            if deadline_s is not None:
                self._telemetry.step(
                    "prefill",
                    request_id,
                    "queued",
                    self.direction,
                    lease_s=deadline_s - time.perf_counter(),
                )

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: Any = None,
        **context: Any,
    ) -> None:
        super()._log_failure(failure_type, req_id, msg, error, meta, **context)  # type: ignore[misc]
        side, error_class = FAILURES.get(failure_type, (self.initiator, "transport"))
        if req_id is None or not (failure_type in FAILURES or failure_type in WIRE_FAILURES):
            return
        worker: Any = self
        self._telemetry.step(
            side,
            req_id,
            "failed",
            self.direction,
            rank=worker.tp_rank,
            error_class=error_class,
            error=f"{failure_type}: {error or msg or context.get('xfer_state', 'no reason given')}",
        )


class PushWorker(_Observed, NixlPushConnectorWorker):
    """Upstream's push worker: on P it writes, on D it registers and waits."""

    direction = "push"
    initiator = "prefill"

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self.nixl_wrapper.on_arrival = self._push_writer_wake.set

    def hand_over(self, metadata: Any) -> None:
        """Give the writer thread this step's registrations and finished blocks at once.

        Upstream does it in `start_load_kv`, which vLLM calls after the forward pass: one engine step late
        (measured: 180 of the 300 ms of a hand-over with four requests in flight). Both kinds of work are
        complete when the metadata arrives, and what the writer causes is looked at only after
        `start_load_kv` has run.
        """
        if not (metadata.push_registrations or metadata.push_finished_blocks):
            return
        for request_id, registration in metadata.push_registrations.items():
            self._reg_send_inbox.put((request_id, registration))
        for request_id, block_ids in metadata.push_finished_blocks.items():
            self._finished_blocks_inbox.put((request_id, block_ids))
        metadata.push_registrations = {}
        metadata.push_finished_blocks = {}
        self._push_writer_wake.set()

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        super()._do_send_reg_notif(req_id, reg_data)
        self._telemetry.step("decode", req_id, "registered", "push", rank=self.tp_rank)

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        peer_engine_id = registration_data.get("decode_engine_id")
        self._telemetry.step(
            "prefill",
            request_id,
            "matched",
            "push",
            rank=self.tp_rank,
            peer_request_id=registration_data.get("request_id"),
            peer_engine_id=peer_engine_id,
            ranks_expected=self.world_size,
        )
        if peer_engine_id not in self._remote_agents:
            self._telemetry.step("prefill", request_id, "handshaking", "push", rank=self.tp_rank)
        super()._do_start_push_kv(request_id, local_block_ids, registration_data)

    def _xfer_blocks_for_req(self, req_id: str, meta: Any) -> None:
        self._open(req_id, lambda: super(PushWorker, self)._xfer_blocks_for_req(req_id, meta))


class PullWorker(_Observed, NixlPullConnectorWorker):
    """Upstream's pull worker: on D it reads, on P it holds blocks until they have been read."""

    direction = "pull"
    initiator = "decode"

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self.nixl_wrapper.tracks = self._tracks

    def _tracks(self, request_id: str) -> bool:
        return request_id in self._reqs_to_send or request_id in self._reqs_to_process

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        def read() -> None:
            super(PullWorker, self)._read_blocks_for_req(req_id, meta)

        if not any(len(group) for group in meta.local_block_ids):
            self._telemetry.step("decode", req_id, "skipped", "pull", rank=self.tp_rank)
            read()
            return
        self._telemetry.step(
            "decode", req_id, "matched", "pull", rank=self.tp_rank, ranks_expected=self.world_size
        )
        if meta.remote.engine_id not in self._remote_agents:
            self._telemetry.step("decode", req_id, "handshaking", "pull", rank=self.tp_rank)
            read()
            return
        self._open(req_id, read)
