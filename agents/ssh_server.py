"""The agent's own SSH server, for nodes without sshd: kvtop's protocol and nothing else.

Public keys only. No shell, no terminal, no file transfer, no forwarding but to the agent's two console
sockets. It is off unless asked for, and listens on loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import asyncssh

from kvtop.agents.client import connect_unix
from kvtop.agents.reports import Report, as_json, as_table
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.ssh_act import PROGRAM, VERBS, act_for_key
from kvtop.agents.who import connect_for

logger = logging.getLogger("kvtop.agent.ssh")

LOGIN_TIMEOUT_S: Final = 15
KEEPALIVE_S: Final = 30
COMMANDS: Final = (
    "kvtop-agent stdio",
    "kvtop-agent stdio --view",
    "kvtop-agent status",
    "kvtop-agent status --json",
    "kvtop-agent transfers",
    "kvtop-agent transfers --json",
)
"""All that a client can run, beside the acting verbs."""
_Reader = asyncssh.SSHReader[bytes]
_Writer = asyncssh.SSHWriter[bytes]
_Handler = Callable[[_Reader, _Writer], Awaitable[None]]
_FINGERPRINT: Final = "kvtop-fingerprint"
EXIT_REFUSED: Final = 126
EXIT_NO_CONNECTION: Final = 3
CHUNK_BYTES: Final = 1 << 16


class _Known(asyncssh.SSHAuthorizedKeys):
    """Authorized keys that note with a connection which of them let it in."""

    def validate(self, key: asyncssh.SSHKey, *args: Any, **kwargs: Any) -> Any:
        """Return the options of a key that may connect, its fingerprint among them; None for others."""
        options = super().validate(key, *args, **kwargs)
        return None if options is None else {**options, _FINGERPRINT: key.get_fingerprint()}


class _Gate(asyncssh.SSHServer):
    """What one SSH connection may do."""

    def __init__(self, paths: RuntimePaths) -> None:
        self._sockets = {
            name: path for path in (paths.view, paths.operate) for name in (str(path), path.name)
        }
        self._peer = "unknown"
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._peer = "{}:{}".format(*conn.get_extra_info("peername")[:2])

    def connection_lost(self, exc: Exception | None) -> None:
        logger.info("SSH client %s left%s", self._peer, f": {exc}" if exc else "")

    def begin_auth(self, username: str) -> bool:
        return True

    def auth_completed(self) -> None:
        logger.info("SSH client %s came in", self._peer)

    def public_key_auth_supported(self) -> bool:
        return True

    def unix_connection_requested(self, dest_path: str) -> _Handler | bool:
        path = self._sockets.get(dest_path)
        if path is None:
            logger.warning("SSH client %s asked for the socket %r and was refused", self._peer, dest_path)
            return False

        client = self._connection
        assert client is not None

        async def forward(reader: _Reader, writer: _Writer) -> None:
            with contextlib.suppress(OSError):
                await _bridge(path, client, reader, writer)
            writer.close()

        return forward


async def _run_command(paths: RuntimePaths, process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run one of the fixed commands for a client."""
    try:
        program, *words = shlex.split(process.command or "") or [""]
    except ValueError:  # an exception would end the whole connection, a console's beside it included
        program, words = "", []
    acts = program == PROGRAM and words[:1] and words[0] in VERBS
    wanted = " ".join((program, *words))
    if not (acts or wanted in COMMANDS) or process.get_terminal_type() is not None:
        offered = "; ".join((*COMMANDS, f"{PROGRAM} {'|'.join(VERBS)} …"))
        process.stderr.write(f"this is no shell: it runs, without a terminal, {offered}\n".encode())
        process.exit(EXIT_REFUSED)
        return
    command, *options = words
    path = paths.view if "--view" in options or command != "stdio" else paths.operate
    try:
        client = process.channel.get_connection()
        assert isinstance(client, asyncssh.SSHServerConnection)
        if acts:
            out, err = (_lines_to(stream) for stream in (process.stdout, process.stderr))
            process.exit(await act_for_key(paths.operate, words, *_identity(client), out, err))
            return
        if command == "stdio":
            await _bridge(path, client, process.stdin, process.stdout)
        else:
            report: Report = "status" if command == "status" else "transfers"
            process.stdout.write(await _report(path, report, json_wanted="--json" in options))
        process.exit(0)
    except OSError as error:
        process.stderr.write(f"the agent does not answer: {error}\n".encode())
        process.exit(EXIT_NO_CONNECTION)


def _lines_to(stream: _Writer) -> Callable[[str], None]:
    """Return what writes a line to a client, who may have left."""

    def write(line: str) -> None:
        with contextlib.suppress(OSError):
            stream.write(f"{line}\n".encode())

    return write


def _identity(client: asyncssh.SSHServerConnection) -> tuple[str, str]:
    """Return the fingerprint of the key that let a client in, and its address."""
    host, port = client.get_extra_info("peername", ("", ""))[:2]
    return str(client.get_key_option(_FINGERPRINT, "")), f"{host}:{port}"


async def _report(path: Path, report: Report, *, json_wanted: bool) -> bytes:
    connection = await connect_unix(path)
    async with connection:
        snapshot = await connection.snapshot()
    text = as_json(report, snapshot) if json_wanted else as_table(report, snapshot)
    return f"{text}\n".encode()


async def _bridge(
    path: Path, client: asyncssh.SSHServerConnection, from_client: _Reader, to_client: _Writer
) -> None:
    """Connect the client with one of the agent's sockets until either side ends."""
    reader, writer = await connect_for(path, *_identity(client))

    async def ask() -> None:
        try:
            while chunk := await from_client.read(CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.write_eof()  # the agent still answers what it was asked, and then ends the stream

    async def answer() -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            to_client.write(chunk)
            await to_client.drain()

    asking = asyncio.create_task(ask())
    try:
        await answer()
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, asyncssh.Error):
            await asking
        writer.close()


def _host_key(path: Path) -> asyncssh.SSHKey:
    """Return the server's private key, made where there is none.

    Raises:
        ValueError: the file is no private key, or cannot be read or made.
    """
    try:
        return asyncssh.read_private_key(path) if path.exists() else _make_host_key(path)
    except asyncssh.KeyImportError as error:
        raise ValueError(f"the host key {path} is no SSH private key: {error}") from error
    except OSError as error:
        advice = "name a file that this user can read, or one that can be made"
        raise ValueError(f"the host key {path} cannot be used ({error.strerror}): {advice}") from error


def _make_host_key(path: Path) -> asyncssh.SSHKey:
    """Make a key that only its owner can read, and its folder, where there is none, as private."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = asyncssh.generate_private_key("ssh-ed25519", comment="kvtop-agent")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.export_private_key())
    return key


def _authorized_keys(path: Path) -> asyncssh.SSHAuthorizedKeys:
    """Return the keys that may connect.

    Raises:
        ValueError: the file is missing, unreadable or holds no key.
    """
    advice = "put the public keys that may connect into it, one a line"
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the authorized keys {path} cannot be read ({error}): {advice}") from error
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise ValueError(f"the authorized keys {path} hold no key: {advice}")
    try:
        return _Known(text)
    except ValueError as error:
        raise ValueError(f"the authorized keys {path} cannot be understood ({error}): {advice}") from error


async def serve_ssh(
    paths: RuntimePaths, *, host: str, port: int, authorized_keys: Path, host_key: Path
) -> asyncssh.SSHAcceptor:
    """Listen for consoles; port 0 takes a free one, which the acceptor's `get_port` tells.

    Raises:
        ValueError: a key file is missing or unusable; the message names it.
        OSError: the address cannot be listened on.
    """
    return await asyncssh.create_server(
        lambda: _Gate(paths),
        host,
        port,
        server_host_keys=[_host_key(host_key)],
        authorized_client_keys=_authorized_keys(authorized_keys),
        process_factory=lambda process: _run_command(paths, process),
        encoding=None,
        password_auth=False,
        kbdint_auth=False,
        host_based_auth=False,
        gss_host=None,
        allow_pty=False,
        x11_forwarding=False,
        agent_forwarding=False,
        allow_scp=False,
        login_timeout=LOGIN_TIMEOUT_S,
        keepalive_interval=KEEPALIVE_S,
        server_version="kvtop",
    )
