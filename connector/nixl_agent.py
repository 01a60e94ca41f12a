"""One NIXL agent for both halves of the connector.

Every NIXL agent runs a progress thread and registers the KV cache, and the first pull of a second agent was
seen to block for 30 s inside NIXL. So both halves share one agent: memory is registered once, each peer's
agent is added once, and each incoming notification is handed to the half that it belongs to.

NIXL's peer tables are not promised to be thread-safe, so adding and removing peers happens on one thread,
the executor that both halves use for their handshakes.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from kvtop.agents.events import Direction
from kvtop.connector import peer_messages
from kvtop.connector.probe import Probed, look_after
from kvtop.connector.upstream import HEARTBEAT_PREFIX, PUSH_REG_NOTIF_PREFIX, init_logger

logger = init_logger("vllm.kvtop.nixl_agent")

Owner = Callable[[str], bool]
"""Whether a half tracks the request of a completion notification (a vLLM request id of this instance)."""


class SharedNixlAgent:
    """The agent itself, what both halves have registered with it, and the routing of notifications."""

    def __init__(self, agent: Any) -> None:
        """Share `agent` (a `nixl_agent`)."""
        self.agent = agent
        self.handshakes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtop-nixl-handshake")
        self._prober = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtop-probe")
        self._halves: dict[Direction, HalfAgent] = {}
        self._metadata: bytes | None = None
        self._pumping = threading.Lock()
        self._peers: dict[bytes, str] = {}
        self._users: Counter[str] = Counter()
        self._guard = threading.Lock()

    def metadata(self) -> bytes:
        """Return what peers need to reach this agent; called once memory is registered.

        Both halves serve the same bytes, so that a peer that meets both knows that they are one agent.
        """
        if self._metadata is None:
            self._metadata = self.agent.get_agent_metadata()
        return self._metadata

    def half(self, direction: Direction) -> HalfAgent:
        """Return the view of the agent that one half uses; made on the first call."""
        return self._halves.setdefault(direction, HalfAgent(self))

    def probe(self, engine_id: str, host: str, port: int, tell: Callable[[str, Probed], None]) -> None:
        """Have a thread of its own look whether a peer engine still lives; `tell` is called there."""
        with contextlib.suppress(RuntimeError):  # the engine ends
            self._prober.submit(lambda: tell(engine_id, look_after(engine_id, host, port)))

    def close(self) -> None:
        """Let the threads end."""
        self.handshakes.shutdown(wait=False, cancel_futures=True)
        self._prober.shutdown(wait=False, cancel_futures=True)

    def pump(self) -> None:
        """Fetch new notifications from NIXL and hand each to its half. Never waits for another pump."""
        if not self._pumping.acquire(blocking=False):
            return
        try:
            arrived = self.agent.get_new_notifs()
        finally:
            self._pumping.release()
        for peer, messages in arrived.items():
            for message in messages:
                self._route(peer, message)

    def _route(self, peer: str, message: bytes) -> None:
        """Hand a notification to the half that it is for: kvtop's own messages are all about pushes."""
        if message.startswith(peer_messages.PREFIX):
            self._halves["push"].on_peer_message(peer_messages.agent_name(peer), message)
            return
        for direction in self._receivers(message):
            self._halves[direction].deliver(peer, message)

    def _receivers(self, message: bytes) -> tuple[Direction, ...]:
        """Return the halves that a notification is for.

        Registrations are push's, heartbeats renew leases that either half may hold, and a completion
        belongs to the half that tracks its request. One that nobody tracks, or that cannot be read, goes to
        push, whose worker counts and logs it.
        """
        if message.startswith(PUSH_REG_NOTIF_PREFIX) or not is_completion(message):
            return ("push",)
        if message.startswith(HEARTBEAT_PREFIX):
            return ("push", "pull")
        request_id = message.rpartition(b":")[0].decode("utf-8", "replace")
        return ("pull",) if self._halves["pull"].tracks(request_id) else ("push",)

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer's agent, or count one more user of it. Runs on the handshake thread."""
        name = self._peers.get(metadata)
        if name is None:
            name = self._peers[metadata] = self.agent.add_remote_agent(metadata)
        with self._guard:
            self._users[name] += 1
        return name

    def drop_peer(self, name: str) -> None:
        """Count one user less; the last one's leaving removes the peer, on the handshake thread."""
        with self._guard:
            self._users[name] -= 1
        try:
            self.handshakes.submit(self._remove_if_unused, name)
        except RuntimeError:  # the executor is shut down: no handshake can run beside us any more
            self._remove_if_unused(name)

    def _remove_if_unused(self, name: str) -> None:
        with self._guard:
            if self._users[name] > 0 or name not in self._peers.values():
                return
            del self._users[name]
        self._peers = {metadata: peer for metadata, peer in self._peers.items() if peer != name}
        try:
            self.agent.remove_remote_agent(name)
        except Exception:
            logger.exception("NIXL did not remove the peer %s", name)

    def registered_by_others(self, half: HalfAgent) -> bool:
        """Whether the other half still has memory registered."""
        return any(other.registrations for other in self._halves.values() if other is not half)

    def first_registrations(self, half: HalfAgent) -> list[Any]:
        """Return what the other half has registered, to be shared instead of registered again."""
        return next((other.registrations for other in self._halves.values() if other is not half), [])


class HalfAgent:
    """What one half takes for its own NIXL agent: upstream's `nixl_wrapper`.

    Calls that need no care go straight to the shared agent.
    """

    def __init__(self, shared: SharedNixlAgent) -> None:
        """Give one half its view of `shared`."""
        self._shared = shared
        self._inbox: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self.registrations: list[Any] = []
        self.tracks: Owner = lambda _request_id: False
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_peer_message: Callable[[str, bytes], None] = lambda _peer, _message: None
        self.on_completion: Callable[[bytes], None] | None = None
        """Where to bring what is no registration at once, instead of waiting to be asked."""
        self.on_made: Callable[[Any], None] = lambda _handle: None
        self.on_measured: Callable[[Any, Any], None] = lambda _handle, _telemetry: None
        self.on_released: Callable[[Any], None] = lambda _handle: None

    def __getattr__(self, name: str) -> Any:
        """Forward what this class does not treat itself."""
        return getattr(self._shared.agent, name)

    def deliver(self, peer: str, message: bytes) -> None:
        """Take a notification for this half."""
        if self.on_completion is not None and not message.startswith(PUSH_REG_NOTIF_PREFIX):
            self.on_completion(message)
            return
        self._inbox.put((peer, message))
        self.on_arrival()

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return this half's new notifications by peer."""
        self._shared.pump()
        arrived: dict[str, list[bytes]] = {}
        while True:
            try:
                peer, message = self._inbox.get_nowait()
            except Empty:
                return arrived
            arrived.setdefault(peer, []).append(message)

    def register_memory(self, descriptors: Any, *args: Any, **kwargs: Any) -> Any:
        """Register memory with NIXL, unless the other half has done so for the same regions."""
        shared = self._shared.first_registrations(self)
        position = len(self.registrations)
        if position < len(shared):
            if shared[position].descCount() != descriptors.descCount():
                raise RuntimeError(
                    "the push and pull halves register different memory: "
                    f"{shared[position].descCount()} and {descriptors.descCount()} regions"
                )
            self.registrations.append(shared[position])
            return shared[position]
        registered = self._shared.agent.register_memory(descriptors, *args, **kwargs)
        self.registrations.append(registered)
        return registered

    def deregister_memory(self, descriptors: Any, *args: Any, **kwargs: Any) -> None:
        """Deregister once both halves have let go."""
        if self.registrations:
            descriptors = self.registrations.pop(0)
        if not self._shared.registered_by_others(self):
            self._shared.agent.deregister_memory(descriptors, *args, **kwargs)

    def get_agent_metadata(self) -> bytes:
        """Return the shared agent's metadata."""
        return self._shared.metadata()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Add a peer, or share it where the other half has it."""
        return self._shared.add_peer(metadata)

    def remove_remote_agent(self, name: str) -> None:
        """Let go of a peer; it is removed when neither half uses it."""
        self._shared.drop_peer(name)

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a transfer, and tell who observes."""
        handle = self._shared.agent.make_prepped_xfer(*args, **kwargs)
        self.on_made(handle)
        return handle

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """Return NIXL's figures of a completed transfer, and tell who observes."""
        telemetry = self._shared.agent.get_xfer_telemetry(handle)
        self.on_measured(handle, telemetry)
        return telemetry

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer's handle, and tell who observes. Raises what NIXL raises: then it is kept."""
        self._shared.agent.release_xfer_handle(handle)
        self.on_released(handle)


def is_completion(notification: bytes, ranks: int = 1) -> bool:
    """Whether upstream can read a notification: a heartbeat, or `request_id:tp_size`.

    Upstream's engine ends on any other, and on sizes that do not go into each other.

    Args:
        notification: as NIXL delivered it.
        ranks: this engine's tensor parallel size.

    >>> is_completion(b"HB:a,b"), is_completion(b"cmpl-1:2"), is_completion(b"cmpl-1"), is_completion(b"a:0")
    (True, True, False, False)
    >>> is_completion(b"cmpl-1:4", ranks=2), is_completion(b"cmpl-1:3", ranks=2)
    (True, False)
    """
    try:
        text = notification.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if text.startswith(HEARTBEAT_PREFIX.decode()):
        return True
    request_id, _, size = text.rpartition(":")
    if not request_id or not re.fullmatch(r"[1-9][0-9]{0,4}", size):
        return False
    return max(int(size), ranks) % min(int(size), ranks) == 0
