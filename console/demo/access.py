"""The demo's node agent with its SSH server, and throw-away keys that fit only each other."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtop.agents.runtime import ENV_RUNTIME_DIR
from kvtop.console.demo.ports import HOST
from kvtop.console.demo.processes import NotReady, Processes

AGENT: Final = "agent"
READY_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Access:
    """Where the agent's SSH server listens, and the files a console needs to attach."""

    port: int
    identity: Path
    known_hosts: Path
    authorized_keys: Path
    host_key: Path

    @property
    def target(self) -> str:
        """The host argument for `kvtop`."""
        return f"kvtop@{HOST}:{self.port}"


def make_keys(folder: Path, port: int) -> Access:
    """Write a host key, a client key and the two files by which they know each other into `folder`."""
    import asyncssh  # noqa: PLC0415 - half a second of CPU, needed only here

    folder.mkdir(mode=0o700)
    access = Access(
        port,
        identity=folder / "identity",
        known_hosts=folder / "known_hosts",
        authorized_keys=folder / "authorized_keys",
        host_key=folder / "host_key",
    )
    host, client = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    for key, path in ((host, access.host_key), (client, access.identity)):
        path.touch(mode=0o600)
        path.write_bytes(key.export_private_key())
    access.authorized_keys.write_bytes(client.export_public_key())
    access.known_hosts.write_text(f"[{HOST}]:{port} {host.export_public_key().decode()}")
    return access


def runtime_environment(folder: Path) -> Mapping[str, str]:
    """Return the variable by which agent, engines and tools find each other, below `folder`."""
    return {ENV_RUNTIME_DIR: str(folder / "run")}


def start_agent(processes: Processes, access: Access) -> None:
    """Start the agent and wait until its SSH server answers.

    It is the last to be ended, since an engine that misses its agent starts another one.

    Raises:
        ProcessFailed: it ended; the message holds the end of its log.
        NotReady: it does not answer in time.
    """
    processes.start(
        AGENT,
        [
            *(sys.executable, "-P", "-m", "kvtop.agents.cli", "run"),
            *("--ssh-listen", f"{HOST}:{access.port}"),
            *("--ssh-authorized-keys", str(access.authorized_keys)),
            *("--ssh-host-key", str(access.host_key)),
        ],
        runtime_environment(processes.folder),
        outlives=True,
    )
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _greets(access.port):
        processes.check(AGENT)
        if time.monotonic() > deadline:
            raise NotReady(
                f"the agent's SSH server does not answer after {READY_TIMEOUT_S:g} s; the end of its log:\n"
                f"{processes.tail(AGENT)}"
            )
        time.sleep(0.05)


def _greets(port: int) -> bool:
    """Whether an SSH server answers there."""
    try:
        with socket.create_connection((HOST, port), timeout=2.0) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
