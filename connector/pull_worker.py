"""Upstream's pull worker: on D it reads. What P holds for a reader is held by the push worker.

A read that must end before NIXL says so is abandoned: its handles are polled on, since only then is it known
that nothing is written into D's blocks any more.
"""

from __future__ import annotations

import time
from typing import Any, Final

from kvtop.agents.events import ErrorClass
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.observed import Observed
from kvtop.connector.params import beyond
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import NixlPullConnectorWorker, init_logger

logger = init_logger("vllm.kvtop.pull_worker")

LEASE_MARGIN_S: Final = 0.2
"""For what is on its way, and for the handshake's estimate of P's clock."""


class PullWorker(Observed, NixlPullConnectorWorker):
    """D's reads, observed; each can be given up."""

    direction = "pull"
    initiator = "decode"

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self._abandoned: dict[str, list[Any]] = {}
        self._renewed_since_s: dict[str, float] = {}  # by P's request id; time.perf_counter()
        self.nixl_wrapper.tracks = self._tracks

    @property
    def reads(self) -> int:
        """How many requests have reads on the wire."""
        return len(self._recving_transfers) + len(self._abandoned)

    def _tracks(self, request_id: str) -> bool:
        return request_id in self._reqs_to_send or request_id in self._reqs_to_process

    def give_up(self, request_id: str, error_class: ErrorClass, reason: str) -> bool:
        """End the read of D's request. Returns False where it has ended already."""
        if request_id not in self._recving_metadata:
            return False
        self._telemetry.step(
            "decode", request_id, "failed", "pull", rank=self.tp_rank, error_class=error_class, error=reason
        )
        handles = self._recving_transfers.pop(request_id, None)
        if handles:
            self._abandoned[request_id] = handles
        self._failed_recv_reqs.put(request_id)
        return True

    def read_instead(self, request_id: str, meta: Any) -> None:
        """Read for a request that the push half has waited for until now."""
        self._recving_metadata[request_id] = meta
        self._read_blocks_for_req(request_id, meta)

    def get_transfer_results(self) -> Any:
        """Return upstream's results, and settle what failed as soon as nothing can be written any more."""
        results = super().get_transfer_results()
        done, _failed = super()._pop_done_transfers(self._abandoned)
        self.settled.update(done)
        self.settled.update(results.failed_recving - self._abandoned.keys() - done)
        return results

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        awaited = meta.awaiting_kvs or any(meta.local_block_ids)
        if awaited and req_id not in self._recving_metadata:
            return  # given up while its handshake was under way

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
        if self._lease_is_over(meta):
            self._fail_read(req_id, "expiry", "P's lease had ended before D could read")
            return
        beyond_end = beyond(meta.remote.block_ids, self._blocks_of(meta.remote.engine_id))
        if beyond_end is not None:
            self._fail_read(req_id, "parameters", f"P has no block {beyond_end}: it has fewer")
            return
        try:
            self._open(req_id, read)
        except Exception as error:
            logger.exception("the read for %s could not be posted", req_id)
            self._fail_read(req_id, "transport", f"the read could not be posted: {error}")

    def _send_heartbeats(self, metadata: Any) -> None:
        """Renew leases on P as upstream does, remembering since when each has been renewed."""
        super()._send_heartbeats(metadata)
        if metadata.heartbeat_by_engine:
            now = time.perf_counter()
            known, self._renewed_since_s = self._renewed_since_s, {}
            for engine_id, heartbeat in metadata.heartbeat_by_engine.items():
                if engine_id in self._remote_agents:
                    self._renewed_since_s |= {each: known.get(each, now) for each in heartbeat.req_ids}

    def _lease_is_over(self, meta: Any) -> bool:
        """Whether P may have given the blocks to others: upstream reads them all the same.

        P tells when its lease ends, in its own clock, whose offset the handshake measured; heartbeats that
        began before that end have renewed it.
        """
        expires_s = meta.remote.blocks_expiry_time
        if expires_s is None or not any(meta.local_block_ids):
            return False
        expires_s -= self._engine_clock_offset[meta.remote.engine_id]
        renewed_since_s = self._renewed_since_s.get(meta.remote.request_id)
        if renewed_since_s is not None and renewed_since_s + LEASE_MARGIN_S < expires_s:
            return False
        return bool(time.perf_counter() + LEASE_MARGIN_S >= expires_s)

    def _blocks_of(self, engine_id: str) -> int:
        """Return how many KV blocks, in the scheduler's count, a peer has."""
        info = self.transfer_topo.get_engine_info(engine_id)
        return int(self.dst_num_blocks[engine_id]) // int(info.remote_physical_blocks_per_logical)

    def _fail_read(self, request_id: str, error_class: ErrorClass, reason: str) -> None:
        """End a read through upstream's own bookkeeping; what is on the wire already is waited for."""
        self._telemetry.step(
            "decode", request_id, "failed", "pull", rank=self.tp_rank, error_class=error_class, error=reason
        )
        self._handle_failed_transfer(request_id, None, self._recv_failures)
