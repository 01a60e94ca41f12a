"""Real SSH servers and agents in the test's own process, on loopback and in the test's own folder."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.server import Agent, listen
from kvtop.console.fleet.conversation import DialOptions
from kvtop.console.fleet.targets import SshTarget


async def eventually(condition: Callable[[], object], what: str, *, timeout_s: float = 10.0) -> None:
    """Return as soon as `condition()` is true; fail, naming what was awaited, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        await asyncio.sleep(0.01)


Exec = Callable[["asyncssh.SSHServerProcess[bytes]"], None]


@dataclass
class Keys:
    """A host key and a user key in a folder, with the files that name them."""

    folder: Path

    def __post_init__(self) -> None:
        self.host = asyncssh.generate_private_key("ssh-ed25519")
        self.user = asyncssh.generate_private_key("ssh-ed25519")
        self.identity.write_bytes(self.user.export_private_key())
        self.identity.chmod(0o600)
        self.authorized.write_bytes(self.user.export_public_key())

    @property
    def identity(self) -> Path:
        return self.folder / "id"

    @property
    def authorized(self) -> Path:
        return self.folder / "authorized_keys"

    def known_hosts(self, port: int, key: asyncssh.SSHKey | None = None) -> Path:
        path = self.folder / "known_hosts"
        public = (key or self.host).export_public_key().decode()
        path.write_text(f"[127.0.0.1]:{port} {public}")
        return path


class _Server(asyncssh.SSHServer):
    def __init__(self, *, forwards: bool) -> None:
        self._forwards = forwards

    def unix_connection_requested(self, dest_path: str) -> bool:
        return self._forwards


@dataclass
class Sshd:
    """A running SSH server."""

    keys: Keys
    port: int

    @property
    def target(self) -> SshTarget:
        return SshTarget("node", "127.0.0.1", "tester", self.port)

    def options(self, **fields: object) -> DialOptions:
        values: dict[str, object] = {"identities": (self.keys.identity,), "timeout_s": 5.0, **fields}
        if "known_hosts" not in fields:
            values["known_hosts"] = self.keys.known_hosts(self.port)
        return DialOptions(**values)  # type: ignore[arg-type]


@asynccontextmanager
async def sshd(folder: Path, *, forwards: bool = True, execute: Exec | None = None) -> AsyncIterator[Sshd]:
    """Serve SSH as OpenSSH does: Unix sockets are forwarded, commands go to `execute`."""
    keys = Keys(folder)
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=lambda: _Server(forwards=forwards),
        server_host_keys=[keys.host],
        authorized_client_keys=str(keys.authorized),
        server_version="OpenSSH_9.9",
        process_factory=execute,
        encoding=None,
    )
    try:
        yield Sshd(keys, server.get_port())
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def agent() -> AsyncIterator[RuntimePaths]:
    """Run a real agent in a runtime folder of its own, until its last console has gone."""
    served = Agent()
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        paths = RuntimePaths.at(Path(folder))
        paths.prepare()
        servers = await listen(served, paths)
        try:
            yield paths
        finally:
            for server in servers:
                server.close()
            await eventually(lambda: not served.connections, "the agent's consoles to leave")


@asynccontextmanager
async def unix_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> AsyncIterator[Path]:
    """Serve something else on a Unix socket."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            result = serve(reader, writer)
            if asyncio.iscoroutine(result):
                await result
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(handle(reader, writer)))

    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        server = await asyncio.start_unix_server(start, Path(folder) / "s")
        try:
            yield Path(folder) / "s"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
