"""Options that several commands share, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtop.console.fleet.conversation import DialOptions

_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


def connection_options(command: _F) -> _F:
    """Add HOST… and the options that say how to reach agents."""
    decorators = (
        click.argument("hosts", nargs=-1, metavar="[HOST]..."),
        click.option(
            "-i", "--identity", "identities", type=_FILE, multiple=True, help="Private key to offer."
        ),
        click.option("--known-hosts", type=_FILE, help="Trust host keys from this file only."),
        click.option(
            "--agent-socket",
            metavar="PATH",
            help="The agent's socket on the nodes, where it is not in the usual places.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0.1),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="For connecting to each host.",
        ),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def dial_options(
    identities: tuple[Path, ...], known_hosts: Path | None, agent_socket: str | None, timeout_s: float
) -> DialOptions:
    """Return what `connection_options` parsed as one value."""
    return DialOptions(tuple(identities), known_hosts, agent_socket, timeout_s)
