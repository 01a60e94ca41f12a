"""The engine's side of the ingest link: a bounded ring, and a thread that empties it into the agent.

The engine's threads only ever append to the ring. Everything that can wait or fail (connecting, starting an
agent, sending) happens on the reporter's own thread; when the agent is slow, stopped or gone, events wait in
the ring until it is full, and are then counted as dropped. The same thread takes the agent's orders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from kvtop.agents.events import Batch, EngineEvent, EngineHello, EngineStopping, InstanceReport
from kvtop.agents.orders import Order
from kvtop.agents.runtime import ENV_RUNTIME_DIR, RuntimePaths
from kvtop.agents.wire import (
    HEADER,
    MAX_INBOUND_FRAME_BYTES,
    Clock,
    MalformedFrame,
    Refusal,
    Refused,
    Welcome,
    check_version,
    decode,
    encode_frame,
)

logger = logging.getLogger("kvtop.reporter")

EVENTS_PER_BATCH: Final = 512
SEND_TIMEOUT_S: Final = 2.0
"""A send that takes longer means that the agent is stopped or dead."""
IDLE_EXIT_S: Final = 600
"""How long an agent that an engine started stays without engines and consoles."""
HEARTBEAT_S: Final = 1.0
"""Longest silence of a live connection: an empty batch says that the process still runs."""
LAUNCH_PAUSE_S: Final = (2.0, 60.0)
"""First and longest pause before another agent is launched after one that did not stay."""
RECEIVED_AT_ONCE_BYTES: Final = 1 << 16
_ANSWER = msgspec.msgpack.Decoder(Welcome | Refusal)
_ORDER = msgspec.msgpack.Decoder(Order | Refusal)


class Reporter:
    """Sends one engine process's events to the node agent. `put` may be called from any thread."""

    def __init__(
        self,
        hello: EngineHello,
        paths: RuntimePaths | None = None,
        *,
        capacity: int = 16_384,
        start_agent: bool = True,
        flush_interval_s: float = 0.05,
        on_order: Callable[[Order], None] | None = None,
    ) -> None:
        """Prepare to report as `hello`; nothing happens before `start`.

        Args:
            hello: sent on each connection, with the clock, the loss and the drops of that moment.
            paths: the agent's sockets; by default those of this user's agent.
            capacity: how many events the ring holds.
            start_agent: whether to start an agent where none answers.
            flush_interval_s: how often the ring is emptied.
            on_order: called on the reporter's thread with each of the agent's orders; must not wait. What it
                puts as an answer goes out at once. What it raises is logged.
        """
        self._hello = hello
        self._paths = paths or RuntimePaths.default()
        self._ring: deque[EngineEvent] = deque()
        self._sending: list[EngineEvent] = []
        self._capacity = capacity
        self._start_agent = start_agent
        self._flush_interval_s = flush_interval_s
        self._dropped = 0
        self._unsendable = 0  # counted by the reporter's thread alone
        self._told_dropped = 0
        self._lost_ns: int | None = None
        self._on_order = on_order
        self._received = bytearray()
        self._standing: InstanceReport | None = None
        self._socket: socket.socket | None = None
        self._refused = False
        self._next_launch_s = 0.0
        self._launch_pause_s = LAUNCH_PAUSE_S[0]
        self._last_send_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtop-reporter", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether an agent listens at this moment, as far as is known."""
        return self._socket is not None

    @property
    def dropped_events(self) -> int:
        """How many events were dropped: because the ring was full, or because no frame could hold them."""
        return self._dropped + self._unsendable

    def put(self, event: EngineEvent) -> None:
        """Append one event. Never waits, never raises; a full ring drops it and counts it."""
        if len(self._ring) >= self._capacity:
            self._dropped += 1
            return
        self._ring.append(event)

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is queued and that the process stops, for at most `timeout_s`."""
        self.put(EngineStopping(time.monotonic_ns()))
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Connect, send, reconnect; until closed or refused for good."""
        retry_s = self._flush_interval_s
        while not self._refused:
            ending = self._closing.is_set()  # read first: what was queued before it is still sent
            try:
                if self._socket is None:
                    self._socket = self._connect()
                    self._launch_pause_s = LAUNCH_PAUSE_S[0]
                    retry_s = self._flush_interval_s
                self._flush(self._socket)
                if not ending:
                    self._listen(self._socket)
            except Refused as refusal:
                self._refused = True
                logger.warning("the node agent does not take this engine's reports: %s", refusal)
            except Exception as error:
                self._lose(error)
                retry_s = min(1.0, retry_s * 2) * random.uniform(0.8, 1.2)
            if ending:
                break
            if self._socket is None:
                self._closing.wait(retry_s)
        if self._socket is not None:
            self._socket.close()

    def _flush(self, connection: socket.socket) -> None:
        """Send all queued events, and any new loss."""
        while self._has_news():
            while self._ring and len(self._sending) < EVENTS_PER_BATCH:
                event = self._ring.popleft()
                if isinstance(event, InstanceReport):
                    self._standing = event
                self._sending.append(event)
            frame, dropped = self._next_frame()
            connection.sendall(frame)
            self._told_dropped = dropped
            self._sending = []
            self._last_send_s = time.monotonic()

    def _listen(self, connection: socket.socket) -> None:
        """Wait until the ring is due, or until the agent says something, and take that.

        Raises:
            ConnectionResetError: the agent has gone.
            MalformedFrame: what it sends is out of step; another connection puts that right.
        """
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(connection, select.POLLIN)
        if not poll.poll(self._flush_interval_s * 1e3):
            return
        received = connection.recv(RECEIVED_AT_ONCE_BYTES)
        if not received:
            raise ConnectionResetError("the agent closed the connection")
        self._received += received
        while len(self._received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received)
            if length > MAX_INBOUND_FRAME_BYTES:
                raise MalformedFrame(f"the agent announces a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._received) < end:
                return
            body = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            self._obey(body)

    def _obey(self, body: bytes) -> None:
        """Hand one order on; what is none, and what goes wrong with it, ends nothing."""
        try:
            order = decode(body, _ORDER)
        except MalformedFrame as error:
            logger.info("the node agent sent what is no order: %s", error)
            return
        if isinstance(order, Refusal):
            logger.info("the node agent closes the connection: %s", order.reason)
            return
        if self._on_order is None:
            return
        try:
            self._on_order(order)
        except Exception:
            logger.exception("an order of the node agent failed: %r", order)

    def _next_frame(self) -> tuple[bytes, int]:
        """Return a frame that the agent accepts and the drops it tells; what does not fit stays queued.

        An event that no frame can hold is dropped: sent again and again, it would end all reporting.
        """
        while True:
            dropped = self.dropped_events
            try:
                frame = encode_frame(Batch(self._sending, dropped))
            except (TypeError, ValueError, OverflowError) as error:
                problem = str(error)
            else:
                if len(frame) - HEADER.size <= MAX_INBOUND_FRAME_BYTES:
                    return frame, dropped
                problem = f"{len(frame)} bytes are more than a frame may hold"
            if len(self._sending) == 1:
                logger.info("dropped an event that cannot be sent: %s", problem)
                self._unsendable += 1
                self._sending = []
                continue
            middle = len(self._sending) // 2
            self._ring.extendleft(reversed(self._sending[middle:]))
            del self._sending[middle:]

    def _has_news(self) -> bool:
        """Whether there is something to send, if only that this process lives."""
        return (
            bool(self._sending or self._ring)
            or self.dropped_events != self._told_dropped
            or time.monotonic() - self._last_send_s >= HEARTBEAT_S
        )

    def _lose(self, error: Exception) -> None:
        """Forget a connection that failed, remembering since when the agent has not heard us."""
        if self._socket is not None:
            self._lost_ns = time.monotonic_ns()
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
            self._received.clear()
            if self._standing is not None:  # the next agent knows nothing of what holds here
                self._sending.insert(0, self._standing)
            logger.info("lost the node agent: %s", error)

    def _connect(self) -> socket.socket:
        """Return a connection on which the agent has welcomed us, starting an agent if need be.

        Raises:
            Refused: the agent speaks another version.
            OSError: no agent answers (yet).
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(SEND_TIMEOUT_S)
            try:
                connection.connect(os.fspath(self._paths.ingest))
            except (FileNotFoundError, ConnectionRefusedError):
                self._launch_agent()
                raise
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        dropped = self.dropped_events
        hello = msgspec.structs.replace(
            self._hello,
            clock=Clock(time.monotonic_ns(), time.time_ns()),
            previous_agent_lost_ns=self._lost_ns,
            dropped_events=dropped,
        )
        connection.sendall(encode_frame(hello))
        (length,) = HEADER.unpack(_receive(connection, HEADER.size))
        if length > MAX_INBOUND_FRAME_BYTES:
            raise MalformedFrame(f"the agent's answer has {length} bytes")
        body = _receive(connection, length)
        answer = decode(body, _ANSWER)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason)
        check_version(body)
        self._told_dropped = dropped

    def _launch_agent(self) -> None:
        """Start an agent that outlives this process. Several engines may do so at once: one agent stays.

        The shell lets go of it at once, so that it is nobody's child here; it inherits no file of the engine.
        """
        now_s = time.monotonic()
        if not self._start_agent or now_s < self._next_launch_s:
            return
        self._next_launch_s = now_s + self._launch_pause_s
        self._launch_pause_s = min(LAUNCH_PAUSE_S[1], self._launch_pause_s * 2)
        self._paths.prepare()
        agent = [sys.executable, "-m", "kvtop.agents.cli", "run", "--exit-when-idle", str(IDLE_EXIT_S)]
        with self._paths.log.open("ab") as log:
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "kvtop", *agent],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, ENV_RUNTIME_DIR: os.fspath(self._paths.folder)},
                cwd="/",
                start_new_session=True,
                close_fds=True,
                check=True,
            )


def _receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the agent closed the connection")
        received += part
    return received
