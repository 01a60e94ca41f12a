"""Telling peers: kvtop's own messages, sent on the push writer's thread after a handshake if need be."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any

from kvtop.agents.events import ErrorClass
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.observed import Observed
from kvtop.connector.peer_messages import (
    Drop,
    Failed,
    Peer,
    PeerMessage,
    agent_name,
    encode,
    is_kvtop_agent,
)
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import NixlPushConnectorWorker, init_logger

logger = init_logger("vllm.kvtop.outbox")


class Outbox(Observed, NixlPushConnectorWorker):
    """Upstream's push worker with a way to tell peers what upstream has no message for."""

    direction = "push"
    initiator = "prefill"

    def observe(self, telemetry: Telemetry, shared: SharedNixlAgent) -> None:
        """Take part in what is observed and shared."""
        super().observe(telemetry, shared)
        self._shared = shared
        self._outbox: SimpleQueue[tuple[Peer, PeerMessage]] = SimpleQueue()

    def shutdown(self) -> None:
        """End as upstream does, and with it the threads that both halves share."""
        super().shutdown()
        if hasattr(self, "_shared"):  # else construction failed
            self._shared.close()

    def agents_of(self, engine_id: str) -> list[str]:
        """Return the names of a peer's NIXL agents, one a rank, as far as this rank has met them."""
        with self._handshake_lock:
            agents = self._remote_agents.get(engine_id) or {}
            return list(map(agent_name, agents.values()))

    def _tell_failed(
        self, registration: dict[str, Any], error_class: ErrorClass, reason: str, *, settled: bool
    ) -> None:
        self._tell(registration, Failed(registration["request_id"], error_class, reason, settled))

    def _tell(self, registration: dict[str, Any], message: PeerMessage) -> None:
        self._outbox.put((peer_of(registration), message))

    def send_outbox(self) -> None:
        """Send what is waiting."""
        for peer, message in drain(self._outbox):
            self._send(peer, message)

    def _send(self, peer: Peer, message: PeerMessage) -> None:
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
        for agent in self.agents_of(peer.engine_id):
            notification = encode(message)
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


def drain(queue: Any) -> Any:
    """Yield what a queue holds now."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
