"""`kvtop demo`, as a person meets it: it comes up by itself, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.tmux import Terminal, terminal
from tests.support.traces import Traces, traces
from tests.support.waiting import wait_until

KVTOP = str(Path(sys.executable).with_name("kvtop"))
START_TIMEOUT_S = 200.0
END_TIMEOUT_S = 40.0
Test = TypeVar("Test", bound=Callable[..., None])


def real(test: Test) -> Test:
    """Mark a test that starts vLLM servers: it has the machine's memory to itself."""
    no_pair = pytest.mark.parametrize("pair", [None], indirect=True, ids=["real"])
    marked: Test = pytest.mark.vllm(no_pair(pytest.mark.usefixtures("pair")(test)))
    return marked


@pytest.fixture
def around() -> Iterator[Traces]:
    """Where the demo runs, and whatever is left of it."""
    with traces() as found:
        yield found


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Terminal]:
    with terminal(tmp_path) as opened:
        yield opened


@contextmanager
def started(arguments: Sequence[str], around: Traces) -> Iterator[subprocess.Popen[str]]:
    """Run a headless demo; whatever the test finds, it is told to end."""
    with subprocess.Popen(
        [KVTOP, "demo", "--headless", *arguments],
        env=around.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.terminate()
            demo.communicate(timeout=END_TIMEOUT_S)


@real
def test_headless_prints_the_figures(around: Traces) -> None:
    with started(["--requests", "20", "--json"], around) as demo:
        output, notices = demo.communicate(timeout=START_TIMEOUT_S)

    assert demo.returncode == 0, notices
    figures = json.loads(output)
    assert (figures["requests"], figures["mode"], figures["simulated"]) == (20, "push", False)
    client, transfers = figures["client"], figures["transfers"]
    assert (client["ok"], client["failed"], client["errors"]) == (20, 0, [])
    assert client["ttft_s"]["count"] == 20
    assert 0 < client["itl_s"]["p50"] <= client["itl_s"]["p99"]
    assert (transfers["done"], transfers["push"], transfers["failed"], transfers["live"]) == (20, 20, 0, 0)
    assert transfers["bytes"] > 0
    assert transfers["descriptors"] > 0
    assert figures["startup_s"]["total"] >= figures["startup_s"]["servers"] > 0
    around.assert_nothing_left()


@real
@pytest.mark.parametrize(
    ("number", "stage"),
    [
        (signal.SIGINT, "VLLM::EngineCore"),
        (signal.SIGKILL, "VLLM::EngineCore"),
        (signal.SIGTERM, "vllm.entrypoints"),
        (signal.SIGHUP, "vllm.entrypoints"),
    ],
)
def test_ending_it_while_the_servers_start_leaves_nothing(
    around: Traces, number: signal.Signals, stage: str
) -> None:
    with started([], around) as demo:
        wait_until(
            lambda: sum(stage in line for line in around.processes()) == 2,
            f"both servers' {stage}",
            timeout_s=90,
            poll_s=0.1,
        )
        demo.send_signal(number)
        wait_until(
            lambda: around.watch() and demo.poll() is not None, "the demo to end", timeout_s=END_TIMEOUT_S
        )
        _, notices = demo.communicate()

    assert demo.returncode == (-number if number == signal.SIGKILL else 130), notices
    around.assert_nothing_left()


def test_simulated_engines_are_marked_on_every_screen(around: Traces, screen: Terminal) -> None:
    screen.run([KVTOP, "demo", "--simulate", "--rate", "8"], around.environment)

    screen.wait_for("SIMULATED", "prefill", "decode")
    screen.press("2")
    screen.wait_for("SIMULATED", "done")
    screen.press("q")

    screen.wait_for("exit code 0", timeout_s=END_TIMEOUT_S)
    around.assert_nothing_left()


def test_closing_the_terminal_ends_it(around: Traces, screen: Terminal) -> None:
    screen.run([KVTOP, "demo", "--simulate"], around.environment)
    screen.wait_for("SIMULATED", "prefill")

    screen.close()

    around.assert_nothing_left()


@real
def test_the_real_one_shows_transfers_ttft_and_itl(around: Traces, screen: Terminal) -> None:
    screen.run([KVTOP, "demo"], around.environment)

    shown = screen.wait_for("prefill-0", "decode-0", "serving", "TTFT", "ITL", timeout_s=START_TIMEOUT_S)
    assert "SIMULATED" not in shown
    screen.press("2")
    screen.wait_for("push", "done", "prefill-0", timeout_s=60)
    screen.press("q")

    screen.wait_for("exit code 0", timeout_s=END_TIMEOUT_S)
    around.assert_nothing_left()
