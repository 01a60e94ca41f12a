"""A console's or script's side of a conversation with an agent, over any pair of streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from kvtop import __version__
from kvtop.agents.act import Answer, Command, Outcome, Plan, Progress
from kvtop.agents.model import AGENT_MESSAGE, AgentMessage, ClientHello, Delta, Snapshot, Subscribe
from kvtop.agents.streams import Reader, Writer, read_frame, write_frame
from kvtop.agents.wire import (
    MAX_OUTBOUND_FRAME_BYTES,
    WIRE_VERSION,
    MalformedFrame,
    Refusal,
    Refused,
    Welcome,
    check_version,
    decode,
)

ANSWER_TIMEOUT_S = 10.0
SILENCE_S = 20.0
"""An agent that carries out a command says something more often than that."""


class AgentConnection:
    """One conversation. Close it with `close`, or use it as an async context manager."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        """Converse over these streams; `open` greets the agent first."""
        self._reader = reader
        self._writer = writer
        self.welcome: Welcome | None = None

    async def open(self) -> Welcome:
        """Greet the agent.

        Raises:
            VersionMismatch: the agent speaks another wire version.
            Refused: the agent refuses, with its reason.
            MalformedFrame, FrameTooLarge: whatever answers is no agent.
            ConnectionError: nothing answers, or the stream ended.
            TimeoutError: no answer within 10 s.
        """
        await write_frame(self._writer, ClientHello(WIRE_VERSION, f"kvtop {__version__}"))
        body = await asyncio.wait_for(self._read(), ANSWER_TIMEOUT_S)
        check_version(body)
        answer = decode(body, AGENT_MESSAGE)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason)
        if not isinstance(answer, Welcome):
            raise MalformedFrame("the agent's first message is no welcome")
        self.welcome = answer
        return answer

    async def snapshot(self, finished: int = 200) -> Snapshot:
        """Return all that the agent knows now, with at most `finished` ended transfers."""
        await write_frame(self._writer, Subscribe(None, finished))
        message = await asyncio.wait_for(self._receive(), ANSWER_TIMEOUT_S)
        if not isinstance(message, Snapshot):
            raise MalformedFrame("the agent did not answer with a snapshot")
        return message

    async def updates(self, interval_s: float, finished: int = 200) -> AsyncIterator[Snapshot | Delta]:
        """Yield a snapshot, then deltas about every `interval_s` seconds, until the stream ends.

        Raises:
            ConnectionError: the stream ended.
        """
        await write_frame(self._writer, Subscribe(interval_s, finished))
        while True:
            message = await self._receive()
            if isinstance(message, Snapshot | Delta):
                yield message

    async def act(self, command: Command) -> AsyncIterator[Answer]:
        """Have the agent run a command; yield its plan, its progress, and at last its outcome.

        Who stops listening does not stop the command.

        Raises:
            ConnectionError: the stream ended before the outcome.
            TimeoutError: the agent has gone silent.
        """
        await write_frame(self._writer, command)
        while True:
            message = await asyncio.wait_for(self._receive(), SILENCE_S)
            if isinstance(message, Plan | Progress | Outcome) and message.id == command.id:
                yield message
                if isinstance(message, Outcome):
                    return

    async def close(self) -> None:
        """End the conversation."""
        with contextlib.suppress(OSError):
            self._writer.close()

    async def __aenter__(self) -> AgentConnection:
        """Greet the agent; see `open`."""
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the conversation."""
        await self.close()

    async def _receive(self) -> AgentMessage:
        message = decode(await self._read(), AGENT_MESSAGE)
        if isinstance(message, Refusal):
            raise Refused(message.reason)
        return message

    async def _read(self) -> bytes:
        body = await read_frame(self._reader, MAX_OUTBOUND_FRAME_BYTES)
        if body is None:
            raise ConnectionResetError("the agent closed the connection")
        return body


async def connect_unix(path: Path) -> AgentConnection:
    """Return a conversation with the agent behind a Unix socket, not yet greeted.

    Raises:
        FileNotFoundError, ConnectionRefusedError: no agent listens there.
        PermissionError: this user may not connect.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    return AgentConnection(reader, writer)
