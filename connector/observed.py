"""What the push and the pull worker do alike: report what they see, and give up what must end.

Mixed in before upstream's worker class. Each override calls upstream's method once, with what it was given,
and returns what it returned; reports are made beside it and never raise.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

import zmq

from kvtop.agents.events import Direction, ErrorClass, PairReport, Side
from kvtop.connector.handshakes import ShakingHands
from kvtop.connector.nixl_agent import HalfAgent, SharedNixlAgent
from kvtop.connector.telemetry import Telemetry

FAILURES: Final[dict[str, tuple[Side, ErrorClass]]] = {
    "handshake_failed": ("decode", "handshake"),
    "push_reg_handshake_failed": ("decode", "handshake"),
    "push_handshake_failed": ("prefill", "handshake"),
}
"""Upstream's failure types that end a transfer before anything is posted: who reports each, and its class."""

WIRE_FAILURES: Final = ("transfer_setup_failed", "transfer_failed", "transfer_exception")
"""Upstream's failure types of the initiator's own NIXL transfers."""


class Observed(ShakingHands):
    """Reports every transfer's life, and remembers peers."""

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
        self.settled: Counter[str] = Counter()
        """D's requests into whose blocks this rank lets nothing more be written; some have failed, here or on
        another rank."""
        self.pairs: dict[str, PairReport] = {}
        """What changed about peers since the scheduler was last told, by engine id."""
        self.replaced: list[str] = []
        """Engine ids of peers in whose place another engine has been met."""
        self._peer_at: dict[tuple[str, int], str] = {}
        agent: HalfAgent = worker.nixl_wrapper
        agent.on_made = self._handle_made
        agent.on_measured = self._handle_measured
        agent.on_released = self._handle_released
        self.shake_hands_on(shared.handshakes)

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
            self._report_expired(request_id)

    def _report_expired(self, request_id: str) -> None:
        self._telemetry.step(
            "prefill",
            request_id,
            "expired",
            None,  # as P expected it
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
                    None,
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
        reason = f"{failure_type}: {error or msg or context.get('xfer_state', 'no reason given')}"
        if failure_type == "handshake_setup_failed":
            self._note_pair(str(context.get("remote_engine_id")), "failed", handshake_reason(error))
            return
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
            error=reason,
        )

    def _track_remote_engine_replacement(self, engine_id: str, host: str, port: int) -> None:
        """Upstream calls this after each handshake, on the handshake thread with its lock held."""
        super()._track_remote_engine_replacement(engine_id, host, port)  # type: ignore[misc]
        before = self._peer_at.get((host, port))
        self._peer_at[(host, port)] = engine_id
        self._note_pair(engine_id, "ready", address=f"{host}:{port}")
        if before not in (None, engine_id):
            self.replaced.append(str(before))

    def _note_pair(self, engine_id: str, state: Any, reason: str = "", address: str = "") -> None:
        self.pairs[engine_id] = PairReport(engine_id, state, time.monotonic_ns(), reason, address)

    def evict(self, engine_id: str) -> bool:
        """Forget a peer's NIXL state unless a transfer with it is under way; return whether none is left."""
        worker: Any = self
        if engine_id not in worker._remote_agents:
            return True
        if self.busy_with(engine_id):
            return False
        worker._cleanup_remote_engine(engine_id, log_eviction=False)
        self._note_pair(engine_id, "evicted")
        return True

    def busy_with(self, engine_id: str) -> bool:
        """Whether a transfer with this peer is under way, or a handshake with any peer."""
        worker: Any = self
        with worker._handshake_lock:
            if worker._handshake_futures:
                return True
        waiting = (meta.remote.engine_id for meta in worker._recving_metadata.values() if meta.remote)
        return engine_id in waiting


def timed_out(error: BaseException | None) -> bool:
    """Whether a handshake failed for want of an answer: zmq calls that `Again`."""
    return isinstance(error, zmq.Again)


def handshake_reason(error: BaseException | None) -> str:
    """Say why a handshake failed, for people."""
    if timed_out(error):
        return "handshake timed out: the peer hangs, or its handshake port is blocked"
    return f"handshake failed: {error}"
