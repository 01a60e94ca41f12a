"""The agent's sockets: engines report on one, consoles look and act on the others, all on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvtop import __version__
from kvtop.agents.act import Command
from kvtop.agents.audit import AuditLog
from kvtop.agents.broadcast import Broadcast, next_beat
from kvtop.agents.commands import Commands
from kvtop.agents.events import (
    ENGINE_BATCH,
    ENGINE_HELLO,
    EngineEvent,
    EngineHello,
    EngineStats,
    EngineStopping,
    InstanceReport,
    LatencySamples,
    OrderAnswer,
    TransferEvent,
)
from kvtop.agents.facts import Host, ProcessStats
from kvtop.agents.instances import Attachment, Instances
from kvtop.agents.ledger import FINISHED_KEPT, Ledger
from kvtop.agents.model import CLIENT_HELLO, CLIENT_MESSAGE, Node, Subscribe
from kvtop.agents.row import Row
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.scene import Scene
from kvtop.agents.streams import read_frame, write, write_frame
from kvtop.agents.who import Who, peer_credentials, who_is
from kvtop.agents.wire import (
    MAX_INBOUND_FRAME_BYTES,
    WIRE_VERSION,
    Clock,
    Refusal,
    Welcome,
    WireError,
    check_version,
    decode,
    encode_frame,
)

logger = logging.getLogger("kvtop.agent")

SOFTWARE: Final = f"kvtop {__version__}"
HELLO_TIMEOUT_S: Final = 10.0
REFRESH_S: Final = 1.0
MAX_UNSENT_BYTES: Final = 1 << 16
"""Most bytes of orders that wait for an engine process that does not read."""
MODES: Final = {"ingest": 0o600, "view": 0o660, "operate": 0o600}
Role = Literal["engine", "view", "operate"]


class Agent:
    """What one agent knows, and its conversations with engines and consoles."""

    def __init__(
        self, *, finished_kept: int = FINISHED_KEPT, audit: AuditLog | None = None, engine_logs: bool = True
    ) -> None:
        """Begin knowing nothing; record commands in `audit`, and keep the last words of engines that die."""
        self.started_ns = time.monotonic_ns()
        self.rejected_frames = 0
        self.connections = 0
        self.idle_since_ns = self.started_ns
        self.instances = Instances(lambda: self.ledger, engine_logs=engine_logs)
        self.host: Host | None = None
        self.ledger = Ledger(
            finished_kept=finished_kept,
            name_of=self.instances.name_of,
            attached=self.instances.attached,
            completed=self._count_bytes,
        )
        self._broadcast = Broadcast(self.instances, self.ledger, self.node, lambda: self.host)
        self._scene = Scene(self.instances, self.ledger)
        self.commands = Commands(self._scene, audit or AuditLog(None), self.started_ns)

    def node(self) -> Node:
        """Return what consoles are told about this agent."""
        return Node(
            name=socket.gethostname(),
            software=SOFTWARE,
            agent_pid=os.getpid(),
            agent_started_ns=self.started_ns,
            clock=Clock(time.monotonic_ns(), time.time_ns()),
            rejected_frames=self.rejected_frames,
            finished_kept=self.ledger.finished_kept,
            transfers_done=self.ledger.total.done,
            transfers_failed={**self.ledger.total.failed},
        )

    def sampled(self, host: Host, processes: dict[int, ProcessStats]) -> None:
        """Take a sample of the node and of the processes, by pid."""
        self.host, self.instances.stats = host, processes

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: Role) -> None:
        """Serve one connection to its end. Whatever the other side sends, the agent lives."""
        self.connections += 1
        try:
            await self._greet_and_serve(reader, writer, role)
        except WireError as error:
            self.rejected_frames += 1
            logger.warning("closed a connection on the %s socket: %s", role, error)
            with contextlib.suppress(OSError):
                await write_frame(writer, Refusal(WIRE_VERSION, SOFTWARE, str(error)))
        except TimeoutError:
            logger.info("closed a connection on the %s socket that said nothing", role)
        except OSError as error:
            logger.info("lost a connection on the %s socket: %s", role, error)
        except Exception:
            logger.exception("a bug in kvtop ended a connection on the %s socket; please report it", role)
        finally:
            self.connections -= 1
            self.idle_since_ns = time.monotonic_ns()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _greet_and_serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: Role
    ) -> None:
        body = await asyncio.wait_for(read_frame(reader, MAX_INBOUND_FRAME_BYTES), HELLO_TIMEOUT_S)
        if body is None:
            return
        check_version(body)
        welcome = Welcome(WIRE_VERSION, SOFTWARE, socket.gethostname(), os.getpid(), self.started_ns, role)
        if role == "engine":
            hello = decode(body, ENGINE_HELLO)
            await write_frame(writer, welcome)
            await self._hear(reader, writer, hello)
        else:
            decode(body, CLIENT_HELLO)
            await write_frame(writer, welcome)
            await self._tell(reader, writer, who_is(writer, role))

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: EngineHello
    ) -> None:
        """Take an engine process's events until it goes."""
        pid, _ = peer_credentials(writer)
        attachment = self.instances.attach(hello, time.monotonic_ns(), _sender(writer), seen_pid=pid)
        logger.info("%s of %s attached", attachment.label, hello.name)
        try:
            while (body := await read_frame(reader, MAX_INBOUND_FRAME_BYTES)) is not None:
                batch = decode(body, ENGINE_BATCH)
                self.instances.heard(attachment, batch.dropped_events, time.monotonic_ns())
                for event in batch.events:
                    self._take(attachment, event)
        finally:
            logger.info("%s of %s detached", attachment.label, hello.name)
            self.instances.detach(attachment, time.monotonic_ns())
            self._scene.dispatch.detached(attachment)

    def _take(self, attachment: Attachment, event: EngineEvent) -> None:
        hello, record = attachment.hello, attachment.record
        match event:
            case TransferEvent():
                self.ledger.apply(hello.engine_id, event, simulated=hello.simulated)
            case LatencySamples():
                at_ns = min(event.at_ns, time.monotonic_ns())
                record.latency.add(at_ns, event.ttft_s, event.itl_s)
            case EngineStats():
                record.load = event
            case EngineStopping():
                attachment.stopping = True
            case OrderAnswer():
                self._scene.dispatch.answered(attachment, event)
            case InstanceReport():
                self.instances.take(attachment, event, time.monotonic_ns())

    def _count_bytes(self, row: Row) -> None:
        """Add a completed transfer to both sides' rates."""
        if row.bytes is None:
            return
        for side in ("prefill", "decode"):
            record = self.instances.records.get(row.engine(side) or "")
            if record is not None:
                window = record.sent if side == "prefill" else record.received
                window.add(min(row.times_ns["done"], time.monotonic_ns()), row.bytes)

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: Who) -> None:
        """Send a console what it asks for until it goes."""
        updates: asyncio.Task[None] | None = None
        acts: set[asyncio.Task[None]] = set()
        wanted: Subscribe | None = None
        try:
            while (body := await read_frame(reader, MAX_INBOUND_FRAME_BYTES)) is not None:
                message = decode(body, CLIENT_MESSAGE)
                if isinstance(message, Command):
                    task = asyncio.create_task(self._act(writer, message, who))
                    acts.add(task)
                    task.add_done_callback(acts.discard)
                else:
                    wanted = message
                    if updates is not None:
                        updates.cancel()
                    updates = task = asyncio.create_task(self._update(writer, wanted))
                task.add_done_callback(lambda task: _close_if_failed(task, writer))
            # A script that has said that it asks no more is still answered.
            await asyncio.gather(*acts)
            if updates is not None and wanted is not None and wanted.interval_s is None:
                await updates
        finally:
            for task in (*acts, *([updates] if updates else ())):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _act(self, writer: asyncio.StreamWriter, command: Command, who: Who) -> None:
        """Run a command and send its answers. Should the client go, the command goes on without it."""
        async for answer in self.commands.answers(command, who):
            await write_frame(writer, answer)

    async def _update(self, writer: asyncio.StreamWriter, wanted: Subscribe) -> None:
        """Send a snapshot, then at each interval what changed. A slow console gets fewer, larger deltas.

        One that fell so far behind that forgotten rows can no longer be named gets another snapshot.
        """
        frame, mark = self._broadcast.snapshot(wanted.finished)
        await write(writer, frame)
        while wanted.interval_s is not None:
            await next_beat(wanted.interval_s)
            frame, mark = self._broadcast.since(mark) or self._broadcast.snapshot(wanted.finished)
            await write(writer, frame)

    async def keep_time(self, exit_when_idle_s: float | None, reachable: Callable[[], bool]) -> None:
        """Judge instances as time passes; return when there is no more reason to serve.

        That is when nobody has been here for `exit_when_idle_s`, or when nobody can come any more.
        """
        while True:
            await asyncio.sleep(REFRESH_S)
            now_ns = time.monotonic_ns()
            try:
                self.instances.refresh(now_ns)
                self.ledger.close_overdue(now_ns)
            except Exception:
                logger.exception("a bug in kvtop kept instances from being judged; please report it")
            idle_s = (now_ns - self.idle_since_ns) / 1e9
            if exit_when_idle_s is not None and self.connections == 0 and idle_s >= exit_when_idle_s:
                logger.info("no engine and no console for %.0f s: ending", exit_when_idle_s)
                return
            if not reachable():
                logger.info("the runtime folder is gone: ending")
                return


def _close_if_failed(updates: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
    """End a conversation whose updates failed: a console must see that nothing comes any more."""
    if not updates.cancelled() and updates.exception() is not None:
        writer.close()


def _sender(writer: asyncio.StreamWriter) -> Callable[[msgspec.Struct], bool]:
    """Return what queues a frame for an engine process, without ever waiting for it."""

    def send(message: msgspec.Struct) -> bool:
        if writer.is_closing() or writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        writer.write(encode_frame(message))
        return True

    return send


async def listen(agent: Agent, paths: RuntimePaths) -> list[asyncio.Server]:
    """Listen on the three sockets. The caller holds the lock, so what lies there is stale."""
    own = {0, os.geteuid()}

    def serving(role: Role) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            _, uid = peer_credentials(writer)
            if role != "view" and uid not in own:
                logger.warning("uid %d may not use the %s socket", uid, role)
                writer.close()
                return
            with contextlib.suppress(asyncio.CancelledError):  # at the agent's end, which asyncio would log
                await agent.converse(reader, writer, role)

        return serve

    async def bind(path: Path, role: Role) -> asyncio.Server:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        server = await asyncio.start_unix_server(serving(role), path)
        await asyncio.to_thread(path.chmod, MODES[path.stem])
        return server

    return [
        await bind(paths.ingest, "engine"),
        await bind(paths.view, "view"),
        await bind(paths.operate, "operate"),
    ]
