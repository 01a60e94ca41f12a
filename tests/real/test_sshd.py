"""The console attaches through OpenSSH's own server, by either way that its configuration allows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtop.agents.runtime import RuntimePaths
from kvtop.console.demo.access import Access, make_keys, runtime_environment, start_agent
from kvtop.console.demo.ports import free_ports
from kvtop.console.demo.processes import Processes
from tests.support.sshd import Sshd, running_sshd
from tests.support.waiting import wait_until

KVTOP = str(Path(sys.executable).with_name("kvtop"))


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """An agent with its own SSH server, and simulated engines that report to it."""
    with Processes() as started:
        access = make_keys(started.folder / "keys", free_ports().ssh)
        start_agent(started, access)
        argv = [sys.executable, "-P", "-m", "kvtop.agents.simulate", "--rate", "10", "--failure-rate", "0"]
        started.start("simulated-engines", argv, runtime_environment(started.folder))
        yield started


@pytest.fixture(scope="module")
def sockets(processes: Processes) -> RuntimePaths:
    return RuntimePaths.at(processes.folder / "run")


@pytest.fixture
def sshd(request: pytest.FixtureRequest, tmp_path: Path, processes: Processes) -> Iterator[Sshd]:
    """An sshd that forwards Unix sockets, or does not: as the test is parametrised."""
    environment = runtime_environment(processes.folder)
    with running_sshd(tmp_path, forwards_sockets=request.param, environment=environment) as server:
        yield server


def kvtop(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVTOP, *arguments], capture_output=True, text=True, timeout=60, check=False)


def ask(what: str, target: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a one-shot command and return its only node; a failure shows what it said."""
    done = kvtop(what, "--json", target, *options)
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(done.stdout)["nodes"]
    assert isinstance(node, dict)
    return node


def assert_shows_the_engines(target: str, options: Sequence[str]) -> None:
    wait_until(
        lambda: (
            {each["role"] for each in ask("status", target, options)["instances"]} >= {"prefill", "decode"}
        ),
        "both simulated engines",
        timeout_s=30,
    )
    wait_until(
        lambda: any(row["stage"] == "done" for row in ask("transfers", target, options)["transfers"]),
        "a finished transfer",
        timeout_s=30,
    )
    assert all(each["simulated"] for each in ask("status", target, options)["instances"])


@pytest.mark.sshd
@pytest.mark.parametrize("sshd", [True], indirect=True)
def test_through_a_forwarded_socket(sshd: Sshd, sockets: RuntimePaths) -> None:
    assert_shows_the_engines(sshd.target, [*sshd.options, "--agent-socket", str(sockets.view)])


@pytest.mark.sshd
@pytest.mark.parametrize(
    "sshd", [True, False], indirect=True, ids=["no-agent-at-the-usual-place", "forbidden"]
)
def test_through_a_command_where_no_socket_can_be_forwarded(sshd: Sshd) -> None:
    assert_shows_the_engines(sshd.target, sshd.options)


@pytest.mark.sshd
@pytest.mark.parametrize("sshd", [False], indirect=True)
def test_a_socket_asked_for_by_name_is_not_replaced_by_another_way(sshd: Sshd, sockets: RuntimePaths) -> None:
    done = kvtop("status", sshd.target, *sshd.options, "--agent-socket", str(sockets.view))

    assert done.returncode == 3
    assert str(sockets.view) in done.stderr


@pytest.mark.sshd
@pytest.mark.parametrize("sshd", [True], indirect=True)
def test_an_unknown_host_key_is_refused_with_the_remedy(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    done = kvtop(
        "status", sshd.target, "-i", str(sshd.access.identity), "--known-hosts", str(tmp_path / "empty")
    )

    assert done.returncode == 3
    assert "host key" in done.stderr
    assert "ssh-keyscan" in done.stderr


@pytest.mark.sshd
@pytest.mark.parametrize("sshd", [True], indirect=True)
def test_a_strangers_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    stranger: Access = make_keys(tmp_path / "stranger", 1)

    known_hosts = str(sshd.access.known_hosts)
    done = kvtop("status", sshd.target, "-i", str(stranger.identity), "--known-hosts", known_hosts)

    assert done.returncode == 3
    assert "keys" in done.stderr


def test_through_the_agents_own_server(processes: Processes) -> None:
    keys = processes.folder / "keys"
    options = ["--identity", str(keys / "identity"), "--known-hosts", str(keys / "known_hosts")]
    address = (keys / "known_hosts").read_text().split()[0]

    assert_shows_the_engines(f"anyone@{address.replace('[127.0.0.1]', '127.0.0.1')}", options)
