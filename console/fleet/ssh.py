"""The way to an agent over SSH: connect as `ssh` would, then reach the agent's Unix socket.

Imported late: asyncssh costs about half a second of CPU. `~/.ssh/config` is honoured as far as asyncssh
goes (Host, Match, Include, ProxyJump, ProxyCommand, IdentityAgent, CertificateFile, ServerAlive*); it
silently skips ControlMaster, StrictHostKeyChecking and KnownHostsCommand, so an unknown host key is always
refused. `--known-hosts` does not reach a jump host; that one is looked up in `~/.ssh/known_hosts`.
"""

from __future__ import annotations

import errno
import shlex
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import asyncssh

from kvtop.console.fleet.conversation import DialOptions
from kvtop.console.fleet.dial import AGENT_SOCKETS, OWN_SERVER_SOCKETS, Channel, no_answer
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.targets import SshTarget

KEEPALIVE_S: Final = 30
KEEPALIVE_COUNT: Final = 3
"""Used where `~/.ssh/config` sets no ServerAliveInterval: a dead path is noticed within two minutes."""
STDIO_COMMAND: Final = "kvtop-agent stdio"
_NOT_FOUND: Final = 127


class _Client(asyncssh.SSHClient):
    """Remembers the host key that was refused, so that the operator can be told which it was."""

    def __init__(self) -> None:
        self.refused_key: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Note a key that known_hosts does not vouch for, and refuse it."""
        del host, addr, port
        self.refused_key = key
        return False


async def open_channel(target: SshTarget, options: DialOptions) -> Channel:
    """Connect to the target and return a byte stream to its agent.

    The sockets of `options.agent_socket` or `AGENT_SOCKETS` are tried in order over one connection, then
    `kvtop-agent stdio`, which finds the agent of the user who logs in.

    Raises:
        ConnectError: it says at which step this failed, and what to do.
    """
    connection = await _connect(target, options)
    try:
        return await _reach_agent(target, options, connection)
    except BaseException:
        connection.close()
        raise


async def _connect(target: SshTarget, options: DialOptions) -> asyncssh.SSHClientConnection:
    client = _Client()
    try:
        settings = await _settings(target, options)
    except (OSError, ValueError, asyncssh.Error) as error:
        raise ConnectError(target.label, "setup", f"an SSH file of yours cannot be used ({error})") from error
    try:
        return await asyncssh.connect(
            settings.host or target.host, settings.port, options=settings, client_factory=lambda: client
        )
    except (OSError, asyncssh.Error) as error:
        raise _explained(target, options, settings, client, error) from error


async def _settings(target: SshTarget, options: DialOptions) -> asyncssh.SSHClientConnectionOptions:
    given: dict[str, object] = {"config": (), "host": target.host, "connect_timeout": options.timeout_s}
    if target.user is not None:
        given["username"] = target.user
    if target.port is not None:
        given["port"] = target.port
    if options.identities:
        given["client_keys"] = [str(path) for path in options.identities]
    if options.known_hosts is not None:
        given["known_hosts"] = str(options.known_hosts)
    settings: asyncssh.SSHClientConnectionOptions
    settings = await asyncssh.SSHClientConnectionOptions.construct(**given)
    if not settings.keepalive_interval:
        given |= {"keepalive_interval": KEEPALIVE_S, "keepalive_count_max": KEEPALIVE_COUNT}
        settings = await asyncssh.SSHClientConnectionOptions.construct(**given)
    return settings


# Reaching the agent


async def _reach_agent(
    target: SshTarget, options: DialOptions, connection: asyncssh.SSHClientConnection
) -> Channel:
    refused: list[asyncssh.ChannelOpenError] = []
    for path in _sockets(options, connection):
        try:
            reader, writer = await connection.open_unix_connection(path)
        except asyncssh.ChannelOpenError as error:
            refused.append(error)
            continue
        except asyncssh.Error as error:
            raise ConnectError(target.label, "lost", f"the SSH connection ended ({error.reason})") from error
        return Channel(reader, writer, connection.close, (asyncssh.Error,))
    if options.agent_socket:
        raise ConnectError(
            target.label,
            "no-agent",
            f"nothing answers on {options.agent_socket} there ({refused[-1].reason})",
            "name the agent's socket with --agent-socket, or start it with `kvtop-agent run`",
        )
    return await _reach_by_command(target, connection)


def _sockets(options: DialOptions, connection: asyncssh.SSHClientConnection) -> tuple[str, ...]:
    """Return the paths to try; each costs a round trip. An agent's own server has names of its own."""
    if options.agent_socket:
        return (options.agent_socket,)
    version = str(connection.get_extra_info("server_version", ""))
    return OWN_SERVER_SOCKETS if "kvtop" in version else AGENT_SOCKETS


async def _reach_by_command(target: SshTarget, connection: asyncssh.SSHClientConnection) -> Channel:
    try:
        process = await connection.create_process(STDIO_COMMAND, encoding=None)
    except asyncssh.Error as error:
        raise ConnectError(
            target.label,
            "forbidden",
            f"sshd there forwards to no agent socket ({', '.join(AGENT_SOCKETS)}) and runs no command "
            f"({error.reason})",
            "start an agent there, or allow AllowStreamLocalForwarding",
        ) from error

    async def explain(error: ConnectError) -> ConnectError:
        if error.kind == "protocol" or await process.stdout.read():
            return ConnectError(
                target.label,
                "protocol",
                f"the login there answers `{STDIO_COMMAND}` with other text",
                "is it an account without a shell, or does its profile print something?",
            )
        text = bytes(await process.stderr.read()).decode("utf-8", "replace").strip()
        await process.wait()
        if process.exit_status == _NOT_FOUND:
            return ConnectError(
                target.label,
                "no-agent",
                "no agent runs there, and `kvtop-agent` is not on that user's PATH",
                "start the engines with KvtopConnector, or install kvtop-pd there and run `kvtop-agent run`",
            )
        return ConnectError(
            target.label,
            "no-agent",
            f"no agent answers there ({text or f'{STDIO_COMMAND} ended with {process.exit_status}'})",
            "start the engines with KvtopConnector, or run `kvtop-agent run` there",
        )

    return Channel(process.stdout, process.stdin, connection.close, (asyncssh.Error,), explain)


# Saying why a connection failed


def _explained(
    target: SshTarget,
    options: DialOptions,
    settings: asyncssh.SSHClientConnectionOptions,
    client: _Client,
    error: OSError | asyncssh.Error,
) -> ConnectError:
    host, port = str(settings.host or target.host), int(settings.port or 22)
    if isinstance(error, OSError) and not isinstance(error, ConnectionResetError):
        return _network_error(target, host, port, options, error)
    if isinstance(error, asyncssh.PermissionDenied):
        return ConnectError(
            target.label,
            "key-refused",
            f"the SSH server takes none of your keys for user {settings.username}",
            "load the right one (`ssh-add`), name it with --identity, or add it to authorized_keys there",
        )
    known = _known_keys(settings, host, port)
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and client.refused_key is not None:
        make = _changed_key if known else _unknown_key
        return make(target, host, port, options.known_hosts, client.refused_key)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return ConnectError(
            target.label,
            "unknown-host-key",
            f"a host key on the way is not trusted ({error.reason})",
            "connect to that host once with `ssh` and check its key",
        )
    if isinstance(error, asyncssh.KeyExchangeFailed) and known and "host key" in error.reason:
        return _changed_key(target, host, port, options.known_hosts, None)
    said = error.strerror if isinstance(error, OSError) else error.reason
    return ConnectError(
        target.label,
        "not-ssh",
        f"port {port} of {host} does not answer as an SSH server ({said or type(error).__name__})",
        f"check the port, and what `ssh -v -p {port} {host}` says",
    )


def _network_error(
    target: SshTarget, host: str, port: int, options: DialOptions, error: OSError
) -> ConnectError:
    if isinstance(error, socket.gaierror):
        return ConnectError(
            target.label, "unreachable", f"the name {host} does not resolve", "check its spelling"
        )
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(
            target.label,
            "unreachable",
            f"port {port} of {host} is closed",
            "is an SSH server running there, and on that port?",
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return no_answer(target, options.timeout_s)
    return ConnectError(
        target.label,
        "unreachable",
        f"{host} cannot be reached ({error.strerror or error})",
        "check the network",
    )


def _known_keys(settings: asyncssh.SSHClientConnectionOptions, host: str, port: int) -> list[object]:
    """Return the keys that known_hosts holds for the host; none where the file cannot be read."""
    source = settings.known_hosts or str(Path.home() / ".ssh" / "known_hosts")
    names = [source] if isinstance(source, str) else source
    files = [str(name) for name in names if Path(str(name)).is_file()] if isinstance(names, Iterable) else []
    try:
        matched = asyncssh.read_known_hosts(files).match(host, "", port if port != 22 else None)
    except (OSError, ValueError):
        return []
    return list(matched[0])


def _fingerprint(key: asyncssh.SSHKey | None) -> str:
    return f"{key.get_fingerprint()} ({key.get_algorithm()})" if key else "of another type"


def _place(known_hosts: Path | None) -> str:
    return shlex.quote(str(known_hosts)) if known_hosts else "~/.ssh/known_hosts"


def _unknown_key(
    target: SshTarget, host: str, port: int, known_hosts: Path | None, key: asyncssh.SSHKey
) -> ConnectError:
    kind = key.get_algorithm().removeprefix("ssh-").split("-")[0]
    return ConnectError(
        target.label,
        "unknown-host-key",
        f"its host key {_fingerprint(key)} is unknown",
        "compare it with the host's own (there: ssh-keygen -lf /etc/ssh/ssh_host_"
        f"{kind}_key.pub), then trust it: ssh-keyscan -t {kind} -p {port} {host} >> {_place(known_hosts)}",
    )


def _changed_key(
    target: SshTarget, host: str, port: int, known_hosts: Path | None, key: asyncssh.SSHKey | None
) -> ConnectError:
    name = host if port == 22 else f"[{host}]:{port}"
    return ConnectError(
        target.label,
        "changed-host-key",
        f"its host key {_fingerprint(key)} is not the one in {_place(known_hosts)}",
        "somebody may be in between; only if the host is known to have a new key, forget the old one: "
        f"ssh-keygen -f {_place(known_hosts)} -R {shlex.quote(name)}",
    )
