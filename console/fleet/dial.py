"""From a target to a conversation with its agent, by whichever way the target names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvtop.agents.act import Answer, Command
from kvtop.agents.client import AgentConnection
from kvtop.agents.model import Delta, Snapshot
from kvtop.agents.runtime import SYSTEM_FOLDER, RuntimeFolderError, RuntimePaths
from kvtop.agents.streams import Reader, Writer
from kvtop.agents.wire import Refused, VersionMismatch, WireError
from kvtop.console.fleet.conversation import Conversation, Dial
from kvtop.console.fleet.conversation import DialOptions as DialOptions
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.targets import LocalTarget, SshTarget, Target

AGENT_SOCKETS: Final = (f"{SYSTEM_FOLDER}/operate.sock", f"{SYSTEM_FOLDER}/view.sock")
"""Where a node's agent is looked for over SSH, in order."""
OWN_SERVER_SOCKETS: Final = ("operate.sock", "view.sock")
"""What an agent's own SSH server calls its sockets, wherever they lie."""
SILENCE_S: Final = 10.0
"""An agent sends a message at each interval, changed or not; after this much silence it counts as lost."""


class Channel(msgspec.Struct, frozen=True):
    """A byte stream to an agent, before the hello."""

    reader: Reader
    writer: Writer
    close: Callable[[], None]
    breaks_with: tuple[type[Exception], ...] = ()
    """What the transport raises when it breaks, beside OSError."""
    explain: Callable[[ConnectError], Awaitable[ConnectError]] | None = None
    """Where the stream comes from a command: says why that did not do what it should."""


class AgentConversation:
    """A `Conversation` over a channel; whatever ends it is a `ConnectError`."""

    def __init__(self, target: Target, channel: Channel) -> None:
        self._target = target
        self._channel = channel
        self._agent = AgentConnection(channel.reader, channel.writer)
        self._breaks_with: tuple[type[Exception], ...] = (OSError, *channel.breaks_with)

    async def greet(self) -> None:
        """Exchange hellos.

        Raises:
            ConnectError: what answers is no agent, or none that this console can talk to.
        """
        try:
            with self._errors():
                await self._agent.open()
        except ConnectError as error:
            if self._channel.explain is not None and error.kind in ("lost", "protocol"):
                raise await self._channel.explain(error) from error
            raise

    async def snapshot(self) -> Snapshot:
        """Return what the agent knows now; see `Conversation`."""
        with self._errors():
            return await self._agent.snapshot()

    async def updates(self, interval_s: float) -> AsyncIterator[Snapshot | Delta]:
        """Yield a snapshot, then deltas; see `Conversation`."""
        messages = aiter(self._agent.updates(interval_s))
        while True:
            with self._errors():
                message = await asyncio.wait_for(anext(messages), SILENCE_S + interval_s)
            yield message

    async def act(self, command: Command) -> AsyncIterator[Answer]:
        """Have the agent run a command; see `Conversation`."""
        answers = aiter(self._agent.act(command))
        while True:
            try:
                with self._errors():
                    answer = await anext(answers)
            except StopAsyncIteration:
                return
            yield answer

    async def aclose(self) -> None:
        """Close the stream and what carries it."""
        await self._agent.close()
        self._channel.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what can go wrong in a conversation into a `ConnectError`."""
        label = self._target.label
        try:
            yield
        except VersionMismatch as error:
            raise ConnectError(label, "wire-version", str(error)) from error
        except Refused as error:
            raise ConnectError(label, "refused", f"the agent refuses: {error}") from error
        except WireError as error:
            remedy = "is that socket an agent's, and of this kvtop version?"
            raise ConnectError(label, "protocol", f"what answers is no agent ({error})", remedy) from error
        except TimeoutError as error:
            what = "the agent has gone silent"
            raise ConnectError(
                label, "lost", what, "is its node overloaded, or the agent stopped?"
            ) from error
        except self._breaks_with as error:
            what = f"the connection ended ({str(error) or 'by the other side'})"
            raise ConnectError(label, "lost", what) from error


def dialler(options: DialOptions) -> Dial:
    """Return what connects to a target with these options."""

    async def dial(target: Target) -> Conversation:
        async with _within(target, options.timeout_s):
            if isinstance(target, SshTarget):
                from kvtop.console.fleet import ssh  # noqa: PLC0415 - asyncssh only where SSH is used

                channel = await ssh.open_channel(target, options)
            else:
                channel = await _open_local(target)
            conversation = AgentConversation(target, channel)
            try:
                await conversation.greet()
            except BaseException:
                await conversation.aclose()
                raise
        return conversation

    return dial


@contextlib.asynccontextmanager
async def _within(target: Target, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise no_answer(target, timeout_s) from error


def no_answer(target: Target, timeout_s: float) -> ConnectError:
    """Return the error for a target from which nothing came in time."""
    if isinstance(target, LocalTarget):
        what, remedy = (
            f"the agent did not answer within {timeout_s:g} s",
            "is it stopped, or the machine overloaded?",
        )
    else:
        what = f"no answer from {target.host} within {timeout_s:g} s"
        remedy = "is the host up, and does a firewall drop the connection? (--timeout waits longer)"
    return ConnectError(target.label, "no-answer", what, remedy)


async def _open_local(target: LocalTarget) -> Channel:
    """Connect to the first of the target's sockets that takes us."""
    problems: dict[str, None] = {}
    for path in _local_sockets(target):
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except PermissionError as error:
            what = f"this user may not connect to {path}"
            raise ConnectError(
                target.label, "forbidden", what, "run kvtop as the user who runs the engines"
            ) from error
        except OSError as error:
            missing = isinstance(error, FileNotFoundError) and target.socket is None
            where = f"no socket in {path.parent}" if missing else f"{path}: {error.strerror or error}"
            problems[where] = None
            continue
        return Channel(reader, writer, writer.close)
    raise ConnectError(
        target.label,
        "no-agent",
        f"no agent runs on this machine ({'; '.join(problems)})",
        "name a host, start engines with KvtopConnector, or run `kvtop-agent run`; `kvtop demo` shows one",
    )


def _local_sockets(target: LocalTarget) -> list[Path]:
    if target.socket is not None:
        return [target.socket]
    try:
        own = RuntimePaths.default()
    except RuntimeFolderError as error:
        raise ConnectError(target.label, "setup", str(error)) from error
    system = RuntimePaths(SYSTEM_FOLDER)
    return list(dict.fromkeys([own.operate, own.view, system.operate, system.view]))
