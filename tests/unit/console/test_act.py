"""`kvtop drain …` and the other verbs on the jump host: targets are found, and acted on once."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtop.agents.events import EngineHello
from kvtop.agents.runtime import RuntimePaths
from tests.support.acting import ActingNode, acting_node
from tests.support.agent import await_snapshot, hello, reporting, running_agent, runtime_folder, snapshot
from tests.support.waiting import wait_until

KVTOP = [sys.executable, "-m", "kvtop"]


@pytest.fixture(scope="module")
def node() -> Iterator[ActingNode]:
    """Two pairs of engines that nobody asks anything; each test leaves them serving."""
    with runtime_folder() as paths, acting_node(paths, "--rate", "0.001") as running:
        yield running


@pytest.fixture(autouse=True)
def serving_again(node: ActingNode) -> Iterator[None]:
    yield
    drained = [each.name for each in snapshot(node.paths).instances if each.draining]
    if drained:
        assert node.act("undrain", *drained).returncode == 0


@contextmanager
def another_node(engine: EngineHello) -> Iterator[RuntimePaths]:
    """An agent that knows one instance, which only reports."""
    with runtime_folder() as paths, running_agent(paths), reporting(paths, start_agent=False, hello=engine):
        await_snapshot(paths, lambda seen: seen.instances, "the other instance")
        yield paths


def kvtop(node: ActingNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVTOP, *arguments],
        env=node.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kvtop_json(node: ActingNode, *arguments: str) -> dict[str, Any]:
    done = kvtop(node, *arguments, "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["exit_code"] == done.returncode
    return document


def test_every_verb_reaches_the_engines(node: ActingNode) -> None:
    outcomes = [
        kvtop_json(node, *arguments)["state"]
        for arguments in (
            ("mode", "sim-prefill-0", "pull"),
            ("mode", "sim-prefill-0", "push", "--peer", "sim-decode-0"),
            ("mode", "sim-prefill-0", "push"),
            ("drain", "sim-prefill-0", "--wait", "--timeout", "20s"),
            ("undrain", "sim-prefill-0"),
            ("evict", "sim-prefill-0", "sim-decode-1"),
            ("cancel", "999"),
        )
    ]

    assert outcomes == ["done", "done", "done", "done", "done", "done", "usage"]


def test_people_see_the_plan_and_the_outcome(node: ActingNode) -> None:
    done = kvtop(node, "drain", "sim-prefill-0", "--wait")

    assert (done.returncode, done.stdout) == (0, "sim-prefill-0: drained\n")
    assert done.stderr.startswith("kvtop: drain sim-prefill-0 (simulated) on local\n")
    assert "undrain reverses it" in done.stderr


def test_what_it_loads_is_no_terminal_and_no_ssh_library(node: ActingNode) -> None:
    script = (
        "import sys; from kvtop.console.cli import run; code = run(['undrain', 'sim-prefill-0']);"
        "loaded = {'textual', 'asyncssh', 'vllm', 'torch'} & set(sys.modules);"
        "assert not loaded, loaded; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=node.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_among_several_hosts_the_target_is_found_and_others_that_serve_count(node: ActingNode) -> None:
    """The last one on its node is not the last one where another node serves the role too."""
    both = ("sim-prefill-0", "sim-prefill-1")
    with another_node(hello("prefill-there")) as elsewhere:
        hosts = ("-H", "local", "-H", f"unix:{elsewhere.operate}")
        alone = kvtop(node, "drain", *both)
        together = kvtop_json(node, "drain", *both, *hosts)
        there = kvtop(node, "drain", "prefill-there", *hosts)

    assert alone.returncode == 1
    assert "is the last serving prefill instance" in alone.stderr
    assert (together["exit_code"], together["host"]) == (0, "local")
    assert there.returncode == 1
    assert "prefill-there takes no orders, it only reports" in there.stderr


def test_a_name_on_two_hosts_is_not_guessed_and_ids_of_transfers_need_their_host(node: ActingNode) -> None:
    with another_node(hello("sim-prefill-0")) as elsewhere:
        hosts = ("-H", "local", "-H", f"unix:{elsewhere.operate}")
        twice = kvtop(node, "drain", "sim-prefill-0", *hosts)
        apart = kvtop(node, "drain", "sim-prefill-1", "engine-of-sim-prefill-0", *hosts)
        nowhere = kvtop(node, "drain", "nobody", *hosts)
        cancel = kvtop(node, "cancel", "1", *hosts)

    assert {each.returncode for each in (twice, apart, nowhere, cancel)} == {2}
    assert "'sim-prefill-0' is the name of 2 instances: name one by its engine id: simulated-" in twice.stderr
    assert f"engine-of-sim-prefill-0 on unix:{elsewhere.operate}" in twice.stderr
    assert "one command acts on one host" in apart.stderr
    assert "no instance is called 'nobody' on local, unix:" in nowhere.stderr
    assert "name one host with --host" in cancel.stderr


def test_one_agent_under_two_names_is_one(node: ActingNode) -> None:
    done = kvtop(node, "drain", "sim-prefill-0", "-H", "local", "-H", f"unix:{node.paths.operate}")

    assert done.returncode == 0, done.stderr


def test_a_peer_of_another_node_is_found_by_its_name(node: ActingNode) -> None:
    with another_node(hello("decode-there", role="decode")) as elsewhere:
        hosts = ("-H", "local", "-H", f"unix:{elsewhere.operate}")
        done = kvtop_json(node, "mode", "sim-prefill-0", "pull", "--peer", "decode-there", *hosts)

    assert done["facts"]["peer"] == "engine-of-decode-there"
    assert node.instance("sim-prefill-0").peer_modes == {"engine-of-decode-there": "pull"}
    assert kvtop(node, "mode", "sim-prefill-0", "push").returncode == 0


def test_a_host_that_does_not_answer_is_told_and_keeps_no_other_from_acting(node: ActingNode) -> None:
    hosts = ("-H", "unix:/nowhere/s", "-H", "local")

    done = kvtop(node, "drain", "sim-prefill-0", *hosts)
    lost = kvtop(node, "drain", "nobody", *hosts)
    none = kvtop(node, "drain", "sim-prefill-0", "-H", "unix:/nowhere/s")

    assert done.returncode == 0
    assert "kvtop: unix:/nowhere/s: no agent" in done.stderr
    assert (lost.returncode, none.returncode) == (3, 3)
    assert "no host that answers has an instance 'nobody'" in lost.stderr


def test_the_view_socket_refuses(node: ActingNode) -> None:
    done = kvtop(node, "drain", "sim-prefill-0", "-H", f"unix:{node.paths.view}")

    assert done.returncode == 1
    assert "kvtop: refused: the view socket only looks" in done.stderr
    assert not node.instance("sim-prefill-0").draining


@pytest.mark.parametrize(
    "arguments",
    [("drain",), ("drain", "x", "-H", "a;b"), ("mode", "x", "up"), ("drain", "x", "--timeout", "y")],
)
def test_wrong_usage_exits_2(node: ActingNode, arguments: tuple[str, ...]) -> None:
    done = kvtop(node, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def test_ctrl_c_exits_130_and_says_what_stays(node: ActingNode) -> None:
    process = subprocess.Popen(
        [*KVTOP, "mode", "sim-prefill-0", "push", "--wait"],
        env=node.environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "no new transfer has yet completed" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)

    assert process.returncode == 130
    assert told.endswith("kvtop: interrupted: what was ordered stays in force\n")


class Terminal:
    """A command on a terminal of its own, for somebody who types."""

    def __init__(self, node: ActingNode, *arguments: str) -> None:
        self._end, inside = pty.openpty()
        self.process = subprocess.Popen(
            [*KVTOP, *arguments], env=node.environment, stdin=inside, stdout=inside, stderr=inside
        )
        os.close(inside)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        while text not in self.shown:
            self._read()

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def end(self) -> int:
        try:
            while True:
                self._read()
        except OSError:  # the other end is closed
            os.close(self._end)
        return self.process.wait(30)

    def _read(self) -> None:
        self.shown += os.read(self._end, 4096).decode()


def test_on_a_terminal_it_asks_with_the_plan_in_view(node: ActingNode) -> None:
    terminal = Terminal(node, "drain", "sim-prefill-0")
    terminal.wait_for("kvtop: go ahead? [y/N]: ")
    assert "undrain reverses it" in terminal.shown
    assert not node.instance("sim-prefill-0").draining
    terminal.type("y\n")

    assert terminal.end() == 0
    assert "sim-prefill-0: drained" in terminal.shown
    assert terminal.shown.count("undrain reverses it") == 1
    assert node.instance("sim-prefill-0").draining


@pytest.mark.parametrize("answer", ["n\n", "\n", "no\n"])
def test_whoever_does_not_say_yes_has_done_nothing(node: ActingNode, answer: str) -> None:
    terminal = Terminal(node, "drain", "sim-prefill-0")
    terminal.wait_for("go ahead? [y/N]: ")
    terminal.type(answer)

    assert terminal.end() == 130
    assert "nothing was done" in terminal.shown
    assert not node.instance("sim-prefill-0").draining


def test_ctrl_c_where_it_asks_has_done_nothing(node: ActingNode) -> None:
    terminal = Terminal(node, "drain", "sim-prefill-0")
    terminal.wait_for("go ahead? [y/N]: ")
    asking = psutil.Process(terminal.process.pid)
    wait_until(lambda: asking.status() == psutil.STATUS_SLEEPING, "it to wait for an answer")
    terminal.process.send_signal(signal.SIGINT)

    assert terminal.end() == 130
    assert "nothing was ordered" in terminal.shown
    assert not node.instance("sim-prefill-0").draining


@pytest.mark.parametrize("option", ["--yes", "--dry-run"])
def test_it_does_not_ask_where_that_is_answered_already(node: ActingNode, option: str) -> None:
    terminal = Terminal(node, "drain", "sim-prefill-0", option)

    assert terminal.end() == 0
    assert "go ahead" not in terminal.shown
    assert node.instance("sim-prefill-0").draining == (option == "--yes")


def test_what_the_source_of_a_command_is_stands_in_the_record(node: ActingNode) -> None:
    kvtop(node, "undrain", "sim-prefill-0")
    wait_until(lambda: node.audit()[-1]["event"] == "ended", "the record")

    assert "@" in node.audit()[-1]["source"]
    assert Path(node.paths.audit).exists()
