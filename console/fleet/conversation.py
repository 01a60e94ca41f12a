"""What a conversation with an agent is to the rest of the console, whatever carries it.

Apart from `kvtop.console.fleet.dial`, so that the first frame need not wait for what only connecting needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from kvtop.agents.act import Answer, Command
from kvtop.agents.model import Delta, Snapshot
from kvtop.console.fleet.targets import Target


class DialOptions(msgspec.Struct, frozen=True):
    """How to reach agents, for all targets of one command line."""

    identities: tuple[Path, ...] = ()
    """Private keys to offer instead of those that `~/.ssh/config` and ssh-agent hold."""
    known_hosts: Path | None = None
    """The only file to trust host keys from."""
    agent_socket: str | None = None
    """The agent's socket on the nodes, instead of `AGENT_SOCKETS` and `kvtop-agent stdio`."""
    timeout_s: float = 10.0
    """For connecting, until the agent has answered the hello."""


class Conversation(Protocol):
    """An agent that has answered the hello."""

    async def snapshot(self) -> Snapshot:
        """Return what the agent knows now.

        Raises:
            ConnectError: the conversation ended.
        """
        ...

    def updates(self, interval_s: float) -> AsyncIterator[Snapshot | Delta]:
        """Yield a snapshot, then a delta every `interval_s` until cancelled.

        Raises:
            ConnectError: the conversation ended.
        """
        ...

    def act(self, command: Command) -> AsyncIterator[Answer]:
        """Have the agent run a command: yield its plan, its progress, and at last its outcome.

        Raises:
            ConnectError: the conversation ended before the outcome; what was ordered may be in force.
        """
        ...

    async def aclose(self) -> None:
        """Leave."""
        ...


Dial = Callable[[Target], Awaitable[Conversation]]


def late_dialler(options: DialOptions) -> Dial:
    """Return what connects to a target; what that takes is loaded at the first connection."""

    async def dial(target: Target) -> Conversation:
        from kvtop.console.fleet.dial import dialler  # noqa: PLC0415 - after the first frame

        return await dialler(options)(target)

    return dial
