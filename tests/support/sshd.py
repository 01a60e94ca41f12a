"""A real OpenSSH server for tests: on loopback, with throw-away keys, and nothing of the machine's own."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtop.console.demo.access import Access, make_keys
from kvtop.console.demo.ports import HOST
from tests.support.waiting import wait_until

SSHD = Path("/usr/sbin/sshd")
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""The empty folder that sshd wants when root starts it; the service makes it, and there is none here."""


@dataclass(frozen=True)
class Sshd:
    """A server that runs."""

    access: Access
    log: Path

    @property
    def target(self) -> str:
        """The host argument for `kvtop`."""
        return f"{getpass.getuser()}@{HOST}:{self.access.port}"

    @property
    def options(self) -> list[str]:
        """The options that let `kvtop` in, and trust this server only."""
        return ["--identity", str(self.access.identity), "--known-hosts", str(self.access.known_hosts)]


@contextmanager
def running_sshd(folder: Path, *, forwards_sockets: bool, environment: Mapping[str, str]) -> Iterator[Sshd]:
    """Run OpenSSH's server; `environment` is added to that of commands that run over it."""
    assert SSHD.exists(), "OpenSSH's server is not installed: apt-get install openssh-server"
    makes_folder = os.geteuid() == 0 and not PRIVILEGE_SEPARATION.exists()
    if makes_folder:
        PRIVILEGE_SEPARATION.mkdir()
    access = make_keys(folder / "keys", _free_port())
    log, config = folder / "sshd.log", folder / "sshd_config"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = " ".join(f'"{name}={value}"' for name, value in {"PATH": path, **environment}.items())
    config.write_text(
        f"""
        Port {access.port}
        ListenAddress {HOST}
        HostKey {access.host_key}
        AuthorizedKeysFile {access.authorized_keys}
        AuthenticationMethods publickey
        PermitRootLogin prohibit-password
        UsePAM no
        StrictModes no
        PidFile none
        AllowStreamLocalForwarding {"yes" if forwards_sockets else "no"}
        SetEnv {variables}
        """
    )
    with subprocess.Popen([SSHD, "-D", "-f", config, "-E", log], stdin=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _answers(access.port), "sshd to answer")
            yield Sshd(access, log)
        finally:
            server.terminate()
            if makes_folder:
                PRIVILEGE_SEPARATION.rmdir()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex((HOST, port)) == 0
