"""The command line as a person or a script meets it: output, notices, exit codes, and what gets loaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop import __version__
from kvtop.console import cli, commands

KVTOP = [sys.executable, "-m", "kvtop"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an empty HOME and no agent."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {
        key: value for key, value in os.environ.items() if key not in ("SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")
    }
    return {**kept, "HOME": str(home), "KVTOP_RUNTIME_DIR": str(tmp_path / "rt")}


@pytest.fixture
def agent(environment: dict[str, str]) -> Iterator[int]:
    """Run a real agent as its own process and return its pid."""
    command = [sys.executable, "-m", "kvtop.agents.cli", "run"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    path = Path(environment["KVTOP_RUNTIME_DIR"]) / "operate.sock"
    deadline = time.monotonic() + 20
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process.pid
    process.terminate()
    process.wait(10)


def kvtop(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVTOP, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_version(environment: dict[str, str]) -> None:
    done = kvtop(environment, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvtop {__version__}\n", "")


def test_status_prints_a_table(environment: dict[str, str], agent: int) -> None:
    done = kvtop(environment, "status")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("instance")
    assert f"pid {agent}" in done.stdout
    assert "no engine has attached" in done.stdout


@pytest.mark.parametrize("command", ["status", "transfers"])
def test_json_is_data_on_stdout_and_one_failing_host_does_not_hide_the_others(
    environment: dict[str, str], agent: int, command: str
) -> None:
    done = kvtop(environment, command, "--json", "local", "unix:/nowhere/s")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    good, bad = document["nodes"]
    assert good["target"] == "local"
    assert good["node"]["agent_pid"] == agent
    assert good["instances"] == []
    assert good["transfers"] == []
    assert bad["target"] == "unix:/nowhere/s"
    assert bad["error"]["kind"] == "no-agent"
    assert done.stderr == f"kvtop: {bad['error']['message']}\n"


def test_no_agent_is_one_line_and_exit_3(environment: dict[str, str]) -> None:
    done = kvtop(environment, "status")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no agent runs on this machine" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("status", "a;b"), ("a;b",), ("status", "--nonsense"), ("--nonsense",)]
)
def test_usage_errors_exit_2(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    done = kvtop(environment, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("p01",), ("--", "status"), ("--debug", "p01"), ("-i", "/dev/null", "p01")]
)
def test_without_a_terminal_the_console_says_what_to_use(
    environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    done = kvtop(environment, *arguments)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr or "File '/dev/null'" in done.stderr


def test_status_loads_neither_textual_nor_an_engine_nor_asyncssh(
    environment: dict[str, str], agent: int
) -> None:
    script = (
        "import sys; from kvtop.console.cli import run; code = run(['status']);"
        "loaded = {'textual', 'asyncssh', 'vllm', 'nixl', 'torch', 'cryptography'} & set(sys.modules);"
        "assert not loaded, loaded; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_exits_130(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        process = subprocess.Popen(
            [*KVTOP, "status", f"unix:{path}"], env=environment, stderr=subprocess.PIPE, text=True
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, notices = process.communicate(timeout=20)
    assert process.returncode == 130
    assert notices.strip() == "kvtop: interrupted"


def test_a_bug_is_one_line_that_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("made by\nthe test")

    monkeypatch.setattr(commands, "_targets", broken)
    assert cli.run(["status"]) == 70
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "a bug in kvtop" in shown.err
    assert "RuntimeError: made by the test" in shown.err
    assert "--debug" in shown.err
    assert cli.run(["--debug", "status"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_screenshot_is_the_real_console_as_svg(
    environment: dict[str, str], agent: int, tmp_path: Path
) -> None:
    target = tmp_path / "shot.svg"
    done = kvtop(
        environment, "screenshot", str(target), "--size", "100x30", "--after", "0", "--theme", "kvtop-light"
    )
    assert done.returncode == 0, done.stderr
    text = target.read_text().replace("&#160;", " ")
    assert text.startswith("<svg")
    assert "no engine has attached" in text


def test_a_screenshot_of_nothing_exits_3_and_a_wrong_size_or_theme_2(
    environment: dict[str, str], tmp_path: Path
) -> None:
    target = str(tmp_path / "shot.svg")
    assert kvtop(environment, "screenshot", target).returncode == 3
    assert kvtop(environment, "screenshot", target, "--size", "wide").returncode == 2
    done = kvtop(environment, "screenshot", target, "--theme", "nope")
    assert done.returncode == 2
    assert "kvtop-contrast" in done.stderr
    assert not (tmp_path / "shot.svg").exists()
