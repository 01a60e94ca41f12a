"""Connecting: the ways that work, and one line for each way that does not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Protocol

import asyncssh
import pytest

from kvtop.agents.ssh_server import serve_ssh
from kvtop.agents.streams import Writer
from kvtop.agents.wire import WIRE_VERSION, Refusal, encode_frame
from kvtop.console.fleet.conversation import DialOptions
from kvtop.console.fleet.dial import dialler
from kvtop.console.fleet.errors import ConnectError, ConnectKind
from kvtop.console.fleet.targets import LocalTarget, SshTarget, Target
from tests.unit.console.servers import Keys, agent, sshd, unix_server


class Reads(Protocol):
    """asyncio's and asyncssh's readers."""

    async def read(self, n: int = -1) -> bytes: ...


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the tests away from the person's own keys, SSH configuration and agents."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("KVTOP_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


async def refusal(target: Target, options: DialOptions) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        await dialler(options)(target)
    error = caught.value
    assert str(error).startswith(f"{target.label}: ")
    assert "\n" not in str(error)
    assert error.exit_code == 3
    return error


def has(error: ConnectError, kind: ConnectKind, *words: str) -> None:
    assert error.kind == kind, str(error)
    for word in words:
        assert word in str(error)


async def pump(source: Reads, sink: Writer) -> None:
    """Copy a stream to its end."""
    while chunk := await source.read(65536):
        sink.write(chunk)
        await sink.drain()


# Ways that work


async def test_a_local_socket() -> None:
    async with agent() as paths:
        conversation = await dialler(DialOptions())(LocalTarget("local", paths.view))
        snapshot = await conversation.snapshot()
        await conversation.aclose()
    assert snapshot.node.agent_pid == os.getpid()


async def test_over_ssh_to_the_agents_socket(tmp_path: Path) -> None:
    async with agent() as paths, sshd(tmp_path) as server:
        options = server.options(agent_socket=str(paths.operate))
        conversation = await dialler(options)(server.target)
        snapshot = await conversation.snapshot()
        await conversation.aclose()
    assert snapshot.node.agent_pid == os.getpid()


async def test_over_ssh_by_command_where_forwarding_is_forbidden(tmp_path: Path) -> None:
    ran: list[str | None] = []
    ended = asyncio.Event()
    async with agent() as paths:

        async def bridge(process: asyncssh.SSHServerProcess[bytes]) -> None:
            ran.append(process.command)
            command = [sys.executable, "-m", "kvtop.agents.cli", "stdio"]
            local = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, env={**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
            )
            assert local.stdin is not None
            assert local.stdout is not None
            answers = asyncio.create_task(pump(local.stdout, process.stdout))
            await pump(process.stdin, local.stdin)
            local.stdin.close()
            await answers
            process.exit(await local.wait())
            ended.set()

        async with sshd(tmp_path, forwards=False, execute=bridge) as server:  # type: ignore[arg-type]
            conversation = await dialler(server.options())(server.target)
            snapshot = await conversation.snapshot()
            await conversation.aclose()
            await asyncio.wait_for(ended.wait(), 10)
    assert ran == ["kvtop-agent stdio"]
    assert snapshot.node.agent_pid == os.getpid()


@pytest.mark.parametrize("with_socket", [False, True])
async def test_over_the_agents_own_ssh_server(tmp_path: Path, with_socket: bool) -> None:
    keys = Keys(tmp_path)
    host_key = tmp_path / "host_key"
    host_key.write_bytes(keys.host.export_private_key())
    async with agent() as paths:
        server = await serve_ssh(
            paths, host="127.0.0.1", port=0, authorized_keys=keys.authorized, host_key=host_key
        )
        async with server:
            port = server.get_port()
            socket_path = str(paths.view) if with_socket else None
            options = DialOptions((keys.identity,), keys.known_hosts(port), socket_path)
            conversation = await dialler(options)(SshTarget("node", "127.0.0.1", None, port))
            assert (await conversation.snapshot()).node.agent_pid == os.getpid()
            await conversation.aclose()


async def test_ssh_config_names_host_port_user_and_identity(tmp_path: Path, home: Path) -> None:
    async with agent() as paths, sshd(tmp_path) as server:
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text(
            f"Host p01\n HostName 127.0.0.1\n Port {server.port}\n User someone\n"
            f" IdentityFile {server.keys.identity}\n"
            f" UserKnownHostsFile {server.keys.known_hosts(server.port)}\n"
        )
        options = DialOptions(agent_socket=str(paths.view))
        conversation = await dialler(options)(SshTarget("p01", "p01"))
        assert (await conversation.snapshot()).node.agent_pid == os.getpid()
        await conversation.aclose()


# Ways that do not, on this machine


async def test_no_agent_on_this_machine() -> None:
    has(await refusal(LocalTarget("local"), DialOptions()), "no-agent", "kvtop-agent run", "kvtop demo")


async def test_an_agent_of_another_wire_version_refuses() -> None:
    def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Refusal(99, "kvtop 9.9", "this agent speaks wire version 99")))

    async with unix_server(serve) as path:
        error = await refusal(LocalTarget("unix", path), DialOptions())
    has(error, "wire-version", "kvtop 9.9", "99", str(WIRE_VERSION), "same kvtop version on both ends")


async def test_what_answers_is_no_agent() -> None:
    async with unix_server(lambda _, writer: writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as path:
        error = await refusal(LocalTarget("unix", path), DialOptions())
    has(error, "protocol", "is no agent")


async def test_an_agent_that_refuses() -> None:
    def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Refusal(WIRE_VERSION, "kvtop", "too many consoles")))

    async with unix_server(serve) as path:
        has(await refusal(LocalTarget("unix", path), DialOptions()), "refused", "too many consoles")


async def test_an_agent_that_says_nothing() -> None:
    async with unix_server(lambda _r, _w: asyncio.sleep(60)) as path:
        has(await refusal(LocalTarget("unix", path), DialOptions(timeout_s=0.2)), "no-answer", "0.2 s")


async def test_an_agent_that_hangs_up() -> None:
    async with unix_server(lambda _r, _w: None) as path:
        has(await refusal(LocalTarget("unix", path), DialOptions()), "lost", "the connection ended")


# Ways that do not, on the network


async def test_a_closed_port() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        error = await refusal(SshTarget("node", "127.0.0.1", None, port), DialOptions())
    has(error, "unreachable", f"port {port} of 127.0.0.1 is closed", "SSH server running")


async def test_a_name_that_does_not_resolve() -> None:
    error = await refusal(SshTarget("nosuch.invalid", "nosuch.invalid"), DialOptions())
    has(error, "unreachable", "nosuch.invalid does not resolve")


async def test_a_host_that_does_not_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = SshTarget("node", "127.0.0.1", None, silent.getsockname()[1])
        has(await refusal(target, DialOptions(timeout_s=0.3)), "no-answer", "within 0.3 s", "--timeout")


async def test_a_port_that_does_not_speak_ssh() -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n" * 200)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await refusal(SshTarget("node", "127.0.0.1", None, port), DialOptions(timeout_s=3))
    has(error, "not-ssh", f"port {port}", "ssh -v")


# Ways that do not, in SSH


async def test_an_unknown_host_key_is_refused_and_the_fix_named_works(tmp_path: Path) -> None:
    async with agent() as paths, sshd(tmp_path) as server:
        empty = tmp_path / "kh"
        empty.touch()
        options = server.options(known_hosts=empty, agent_socket=str(paths.view))
        error = await refusal(server.target, options)
        fingerprint = server.keys.host.get_fingerprint()
        has(error, "unknown-host-key", fingerprint, "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        fix = str(error).partition("then trust it: ")[2]
        assert fix == f"ssh-keyscan -t ed25519 -p {server.port} 127.0.0.1 >> {empty}"
        await asyncio.to_thread(subprocess.run, fix, shell=True, check=True, capture_output=True)
        conversation = await dialler(options)(server.target)
        await conversation.aclose()


async def test_an_unknown_host_key_is_refused_where_known_hosts_does_not_exist(tmp_path: Path) -> None:
    async with sshd(tmp_path) as server:
        error = await refusal(server.target, server.options(known_hosts=None))
        has(error, "unknown-host-key", ">> ~/.ssh/known_hosts")


async def test_a_changed_host_key_is_called_that(tmp_path: Path) -> None:
    async with sshd(tmp_path) as server:
        other = asyncssh.generate_private_key("ssh-ed25519")
        options = server.options(known_hosts=server.keys.known_hosts(server.port, other))
        error = await refusal(server.target, options)
        has(
            error,
            "changed-host-key",
            "somebody may be in between",
            "ssh-keygen -f",
            f"-R '[127.0.0.1]:{server.port}'",
        )


async def test_a_changed_host_key_of_another_type_is_called_that_too(tmp_path: Path) -> None:
    async with sshd(tmp_path) as server:
        other = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
        options = server.options(known_hosts=server.keys.known_hosts(server.port, other))
        has(await refusal(server.target, options), "changed-host-key", "somebody may be in between")


async def test_a_refused_key(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Keys(tmp_path / "other")
    async with sshd(tmp_path) as server:
        error = await refusal(server.target, server.options(identities=(stranger.identity,)))
        has(error, "key-refused", "for user tester", "--identity", "ssh-add")


async def test_an_identity_that_is_no_key(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no key")
    async with sshd(tmp_path) as server:
        has(await refusal(server.target, server.options(identities=(broken,))), "setup", "SSH file of yours")


async def test_a_host_with_no_agent(tmp_path: Path) -> None:
    def not_found(process: asyncssh.SSHServerProcess[bytes]) -> None:
        process.stderr.write(b"sh: kvtop-agent: not found\n")
        process.exit(127)

    async with sshd(tmp_path, execute=not_found) as server:
        error = await refusal(server.target, server.options())
        has(error, "no-agent", "no agent runs there", "not on that user's PATH", "KvtopConnector")


async def test_a_host_whose_agent_does_not_run(tmp_path: Path) -> None:
    def no_agent(process: asyncssh.SSHServerProcess[bytes]) -> None:
        process.stderr.write(b"no agent answers on /run/user/7/kvtop\n")
        process.exit(3)

    async with sshd(tmp_path, execute=no_agent) as server:
        error = await refusal(server.target, server.options())
        has(error, "no-agent", "no agent answers on /run/user/7/kvtop", "kvtop-agent run")


async def test_a_login_that_prints_text_instead_of_running_the_command(tmp_path: Path) -> None:
    def nologin(process: asyncssh.SSHServerProcess[bytes]) -> None:
        process.stdout.write(b"This account is currently not available.\n")
        process.exit(1)

    async with sshd(tmp_path, execute=nologin) as server:
        has(
            await refusal(server.target, server.options()),
            "protocol",
            "other text",
            "account without a shell",
        )


async def test_an_agent_socket_that_is_not_there(tmp_path: Path) -> None:
    async with sshd(tmp_path) as server:
        error = await refusal(server.target, server.options(agent_socket="/nowhere/s"))
        has(error, "no-agent", "nothing answers on /nowhere/s", "--agent-socket")


async def test_an_ssh_server_that_allows_nothing(tmp_path: Path) -> None:
    async with sshd(tmp_path, forwards=False) as server:
        has(
            await refusal(server.target, server.options()), "forbidden", "runs no command", "AllowStreamLocal"
        )


async def test_another_wire_version_over_ssh(tmp_path: Path) -> None:
    def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Refusal(99, "kvtop 9.9", "")))

    async with unix_server(serve) as path, sshd(tmp_path) as server:
        error = await refusal(server.target, server.options(agent_socket=str(path)))
        has(error, "wire-version", "99")
