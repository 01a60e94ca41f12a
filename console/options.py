"""Options that several commands share, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtop.console.fleet.conversation import DialOptions

DEFAULT_HOSTS = ("local",)
"""Where nothing else is named."""
_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


def connection_options(command: _F) -> _F:
    """Add HOST… and the options that say how to reach agents."""
    hosts = click.argument("hosts", nargs=-1, metavar="[HOST]...")
    return hosts(_reaching("--timeout")(command))


def host_options(command: _F) -> _F:
    """Add the options that say which agents to reach and how, where the arguments name something else."""
    hosts = click.option(
        "-H",
        "--host",
        "hosts",
        multiple=True,
        metavar="HOST",
        help="Where the target is looked for, as `kvtop HOST` takes it; may be repeated (default: local).",
    )
    return hosts(_reaching("--connect-timeout")(command))


def _reaching(timeout_name: str) -> Callable[[_F], _F]:
    """Return what adds the options that say how to reach agents."""

    def add(command: _F) -> _F:
        for decorator in reversed(_how(timeout_name)):
            command = decorator(command)
        return command

    return add


def _how(timeout_name: str) -> tuple[Callable[[_F], _F], ...]:
    return (
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
            timeout_name,
            "timeout_s",
            type=click.FloatRange(min=0.1),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="For connecting to each host.",
        ),
    )


def dial_options(
    identities: tuple[Path, ...], known_hosts: Path | None, agent_socket: str | None, timeout_s: float
) -> DialOptions:
    """Return what `connection_options` parsed as one value."""
    return DialOptions(tuple(identities), known_hosts, agent_socket, timeout_s)
