"""The agent's own SSH server: kvtop's protocol for those whose key is known, and nothing else for anybody."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from kvtop.agents.act import Command, Outcome
from kvtop.agents.audit import AuditLog
from kvtop.agents.client import AgentConnection
from kvtop.agents.model import ClientHello, Subscribe
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.server import Agent, listen
from kvtop.agents.ssh_server import serve_ssh
from kvtop.agents.wire import WIRE_VERSION, encode_frame
from tests.support.agent import runtime_folder


class Door:
    """A serving agent's SSH server, and keys that are and are not known to it."""

    def __init__(self, paths: RuntimePaths, keys: Path) -> None:
        self.paths = paths
        self.port = 0
        self.host_key = paths.folder / "host_key"
        self.known, self.unknown = keys / "known", keys / "unknown"
        for path in (self.known, self.unknown):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(path)
            key.write_public_key(path.with_suffix(".pub"))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Door]:
        self.paths.prepare()
        agent = Agent(audit=AuditLog(self.paths.audit))
        async with AsyncExitStack() as ending:
            for server in await listen(agent, self.paths):
                ending.callback(server.close)
            acceptor = await serve_ssh(
                self.paths,
                host="127.0.0.1",
                port=0,
                authorized_keys=self.known.with_suffix(".pub"),
                host_key=self.host_key,
            )
            ending.push_async_callback(acceptor.wait_closed)
            ending.callback(acceptor.close)
            self.port = acceptor.get_port()
            yield self
            async with asyncio.timeout(10):
                while agent.connections:  # noqa: ASYNC110 - a count, not an event
                    await asyncio.sleep(0.01)

    def enter(self, key: Path | None = None, **options: Any) -> Any:
        given = {"client_keys": [key or self.known], "agent_path": None, "config": None, **options}
        host_key = asyncssh.read_private_key(self.host_key)
        hosts: Any = ([host_key.convert_to_public()], [], [])
        return asyncssh.connect("127.0.0.1", self.port, username="any", known_hosts=hosts, **given)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with runtime_folder() as paths:
        yield Door(paths, tmp_path)


@pytest.mark.parametrize("socket", ["operate.sock", "view.sock", "the whole path"])
async def test_a_known_key_reaches_the_agents_sockets(door: Door, socket: str) -> None:
    async with door.open(), door.enter() as ssh:
        path = str(door.paths.view) if socket == "the whole path" else socket
        reader, writer = await ssh.open_unix_connection(path, encoding=None)
        async with AgentConnection(reader, writer) as agent:
            assert (await agent.snapshot()).instances == []


@pytest.mark.parametrize("way", ["forwarding", "stdio"])
async def test_a_command_is_recorded_with_the_key_that_let_its_sender_in(door: Door, way: str) -> None:
    fingerprint = asyncssh.read_public_key(door.known.with_suffix(".pub")).get_fingerprint()
    async with door.open(), door.enter() as ssh:
        if way == "stdio":
            process = await ssh.create_process("kvtop-agent stdio", encoding=None)
            reader, writer = process.stdout, process.stdin
        else:
            reader, writer = await ssh.open_unix_connection("operate.sock", encoding=None)
        address = "{}:{}".format(*ssh.get_extra_info("sockname")[:2])
        async with AgentConnection(reader, writer) as agent:
            async for answer in agent.act(Command(verb="drain", targets=["nobody"])):
                assert isinstance(answer, Outcome)
                assert answer.exit_code == 2
                assert answer.audited

    (record,) = map(json.loads, (await asyncio.to_thread(door.paths.audit.read_text)).splitlines())
    assert (record["ssh_key"], record["ssh_from"]) == (fingerprint, address)
    assert record["uid"] == os.getuid()


async def test_the_verbs_are_run_and_recorded_for_the_key(door: Door) -> None:
    fingerprint = asyncssh.read_public_key(door.known.with_suffix(".pub")).get_fingerprint()
    async with door.open(), door.enter() as ssh:
        people = await ssh.run("kvtop-agent drain nobody --wait --timeout 60s", stdin=asyncssh.DEVNULL)
        machine = await ssh.run("kvtop-agent cancel '1 2' --json --key once", stdin=asyncssh.DEVNULL)

    assert (people.exit_status, people.stdout) == (2, "")
    assert people.stderr == "kvtop-agent: usage: no instance is called 'nobody'; this agent knows none\n"
    assert machine.exit_status == 2
    assert json.loads(machine.stdout)["message"].startswith("there is no transfer '1 2' here")
    records = [*map(json.loads, (await asyncio.to_thread(door.paths.audit.read_text)).splitlines())]
    assert [(each["verb"], each["targets"], each["ssh_key"]) for each in records] == [
        ("drain", ["nobody"], fingerprint),
        ("cancel", ["1 2"], fingerprint),
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("kvtop-agent drain", "Missing argument 'INSTANCE...'"),
        ("kvtop-agent drain x --timeout soon", "'soon' is no time span"),
        ("kvtop-agent mode x sideways", "'sideways' is not one of"),
        ("kvtop-agent drain --help", "No such option"),
        ("kvtop-agent drain x --runtime-dir /tmp", "No such option"),
    ],
)
async def test_a_verb_that_is_used_wrongly_says_so(door: Door, command: str, said: str) -> None:
    async with door.open(), door.enter() as ssh:
        result = await ssh.run(command, stdin=asyncssh.DEVNULL)

    assert result.exit_status == 2
    assert said in result.stderr
    assert result.stdout == ""


async def test_who_is_not_behind_the_ssh_server_cannot_pass_for_a_key(door: Door) -> None:
    """Anybody can give a socket such an address; the agent believes its own process only."""
    posing = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX);"
        "s.bind(b'\\0kvtop-ssh 1 SHA256:forged 1.2.3.4:5'); s.connect(sys.argv[1]);"
        "s.sendall(sys.stdin.buffer.read()); s.shutdown(socket.SHUT_WR);\n"
        "while s.recv(65536): pass"
    )
    question = encode_frame(ClientHello(WIRE_VERSION, "a test"))
    question += encode_frame(Command(verb="drain", targets=["nobody"]))
    async with door.open():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", posing, str(door.paths.operate), stdin=asyncio.subprocess.PIPE
        )
        await asyncio.wait_for(process.communicate(question), 30)

    assert process.returncode == 0
    (record,) = map(json.loads, (await asyncio.to_thread(door.paths.audit.read_text)).splitlines())
    assert (record["ssh_key"], record["ssh_from"], record["uid"]) == (None, None, os.getuid())


async def test_a_client_without_forwarding_reaches_the_agent_through_stdio(door: Door) -> None:
    async with door.open(), door.enter() as ssh:
        process = await ssh.create_process("kvtop-agent stdio", encoding=None)
        async with AgentConnection(process.stdout, process.stdin) as agent:
            assert agent.welcome is not None
            assert agent.welcome.role == "operate"


async def test_a_question_is_answered_also_when_its_end_follows_at_once(door: Door) -> None:
    question = encode_frame(ClientHello(WIRE_VERSION, "a test")) + encode_frame(Subscribe())
    async with door.open(), door.enter() as ssh:
        result = await asyncio.wait_for(ssh.run("kvtop-agent stdio", input=question, encoding=None), 10)

    assert b"snapshot" in result.stdout


async def test_a_wrong_command_does_not_end_a_conversation_beside_it(door: Door) -> None:
    async with door.open(), door.enter() as ssh:
        reader, writer = await ssh.open_unix_connection("view.sock", encoding=None)
        async with AgentConnection(reader, writer) as agent:
            await ssh.run("kvtop-agent 'status", stdin=asyncssh.DEVNULL)
            assert (await agent.snapshot()).instances == []


@pytest.mark.parametrize("report", ["status", "transfers"])
async def test_a_script_gets_its_report(door: Door, report: str) -> None:
    async with door.open(), door.enter() as ssh:
        machine = await ssh.run(f"kvtop-agent {report} --json")
        people = await ssh.run(f"kvtop-agent {report}")

    assert json.loads(machine.stdout)["schema_version"] == 1
    assert people.exit_status == 0


@pytest.mark.parametrize(
    "options",
    [
        {"key": "unknown"},
        {"client_keys": [], "password": "secret"},
        {"client_keys": []},
        {"client_keys": [], "password": "secret", "preferred_auth": "keyboard-interactive"},
    ],
)
async def test_who_has_no_known_key_stays_outside(door: Door, options: dict[str, Any]) -> None:
    key = door.unknown if options.pop("key", None) else None
    async with door.open():
        with pytest.raises(asyncssh.PermissionDenied):
            async with door.enter(key, **options):
                pass


@pytest.mark.parametrize(
    "command",
    [
        "id",
        "kvtop-agent 'status",
        "kvtop-agent",
        "kvtop-agent run",
        "kvtop-agent stdio; id",
        "kvtop-agent --runtime-dir /tmp drain x",
        "kvtop drain x",
        "sh -c 'kvtop-agent drain x'",
        "sh -c 'kvtop-agent status'",
        None,
    ],
)
async def test_there_is_no_shell_and_no_other_command(door: Door, command: str | None) -> None:
    async with door.open(), door.enter() as ssh:
        result = await ssh.run(command, stdin=asyncssh.DEVNULL)

    assert result.exit_status == 126
    assert "this is no shell" in result.stderr


async def test_there_is_no_terminal(door: Door) -> None:
    async with door.open(), door.enter() as ssh:
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.create_process("kvtop-agent status", term_type="xterm")


@pytest.mark.parametrize("path", ["ingest.sock", "../view.sock", "/var/run/docker.sock", ""])
async def test_no_other_socket_is_reached(door: Door, path: str) -> None:
    async with door.open(), door.enter() as ssh:
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.open_unix_connection(path)


async def test_nothing_is_forwarded_either_way_and_no_files_are_moved(door: Door) -> None:
    async with door.open(), door.enter() as ssh:
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.open_connection("127.0.0.1", door.port)
        with pytest.raises(asyncssh.ChannelListenError):
            await ssh.forward_remote_port("127.0.0.1", 0, "127.0.0.1", door.port)
        with pytest.raises(asyncssh.ChannelListenError):
            await ssh.forward_remote_path(str(door.paths.folder / "more.sock"), str(door.paths.view))
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.start_sftp_client()
        with pytest.raises(asyncssh.SFTPError):
            await asyncssh.scp((ssh, str(door.known)), door.paths.folder)
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.open_tap()


async def test_no_display_is_forwarded(door: Door) -> None:
    async with door.open(), door.enter() as ssh:
        with pytest.raises(asyncssh.ChannelOpenError):
            await ssh.run("kvtop-agent status", x11_forwarding=True, x11_display=":0")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("# no key\n\n", "hold no key"),
        ("ssh-ed25519 nonsense\n", "no key|understood"),
    ],
)
async def test_unusable_authorized_keys_are_named_before_anything_listens(
    door: Door, content: str | None, said: str
) -> None:
    keys = door.known.with_suffix(".pub")
    keys.unlink()
    if content is not None:
        await asyncio.to_thread(keys.write_text, content)

    with pytest.raises(ValueError, match=f"{keys}.*({said}).*put the public keys"):
        async with door.open():
            pass


async def test_the_host_key_is_made_once_and_private(door: Door) -> None:
    key = door.paths.folder / "host_key"
    async with door.open():
        first = await asyncio.to_thread(key.read_bytes)
        assert key.stat().st_mode & 0o777 == 0o600
    async with door.open():
        assert await asyncio.to_thread(key.read_bytes) == first


async def test_the_host_keys_folder_is_made_private(door: Door) -> None:
    door.host_key = door.paths.folder / "keys" / "host_key"
    async with door.open():
        assert door.host_key.parent.stat().st_mode & 0o777 == 0o700


async def test_a_host_key_that_cannot_be_made_is_named(door: Door) -> None:
    door.host_key = door.known / "host_key"  # below a file
    with pytest.raises(ValueError, match=f"{door.host_key} cannot be used .*: name a file"):
        async with door.open():
            pass


async def test_a_host_key_that_is_none_is_named(door: Door) -> None:
    door.paths.prepare()
    await asyncio.to_thread((door.paths.folder / "host_key").write_text, "nonsense")
    with pytest.raises(ValueError, match="host_key is no SSH private key"):
        async with door.open():
            pass
