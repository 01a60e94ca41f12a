"""How an engine ended is told as far as it can be known, by an agent that is not its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.agents.engine_log import BYTES_KEPT, LEFT_OUT, LINES_KEPT, EngineLog, bounded, told
from kvtop.agents.exits import ExitWatch
from kvtop.agents.facts import Exit
from kvtop.agents.model import Instance
from kvtop.agents.oom import oom_count, oom_count_file
from kvtop.agents.runtime import ENV_RUNTIME_DIR, RuntimePaths
from tests.support.agent import await_snapshot, running_agent, runtime_folder, snapshot
from tests.support.child_engine import LOG_LINE, child_engine, go_on
from tests.support.waiting import wait_until

KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
KEEPS_STATUS = KERNEL >= (6, 15)
"""Whether the kernel keeps a reaped process's status; an older one may have lost it when we look."""


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        monkeypatch.setenv(ENV_RUNTIME_DIR, str(folder.folder))
        yield folder


def ended(
    paths: RuntimePaths, *options: str, ending: str, kill: int = 0, log: Path | None = None
) -> Instance:
    """What an agent says of an engine after its end."""
    with running_agent(paths, *options), (log or Path(os.devnull)).open("w") as output:
        with child_engine(ending, output) as engine:
            await_snapshot(paths, lambda seen: seen.instances, "the engine")
            if kill:
                engine.send_signal(kill)
            else:
                go_on(engine)
            engine.wait(20)
        seen = await_snapshot(
            paths, lambda seen: seen.instances[0].exit is not None, "the agent to know of the end"
        )
    return seen.instances[0]


@pytest.mark.skipif(not KEEPS_STATUS, reason="the kernel forgets how a reaped process ended")
@pytest.mark.parametrize(
    ("ending", "kill", "state", "died", "code", "said"),
    [
        ("wait", signal.SIGKILL, "down", "SIGKILL", None, "was killed by SIGKILL"),
        ("segfault", 0, "down", "SIGSEGV", None, "was killed by SIGSEGV"),
        ("exit", 0, "down", None, 3, "ended with exit code 3"),
        ("order", 0, "stopped", None, 0, "shut down in order"),
    ],
)
def test_the_way_an_engine_ended_is_known_to_an_agent_that_did_not_start_it(
    paths: RuntimePaths, ending: str, kill: int, state: str, died: str | None, code: int | None, said: str
) -> None:
    instance = ended(paths, ending=ending, kill=kill)

    assert instance.exit is not None
    assert (instance.state, instance.exit.signal, instance.exit.exit_code) == (state, died, code)
    assert said in instance.state_reason
    assert instance.exit.in_order == (ending == "order")
    assert instance.exit.process == f"engine-core (pid {instance.exit.pid})"
    assert instance.exit.at_ns >= instance.state_since_ns - 10**9


def test_an_end_of_which_nobody_knows_how_is_called_just_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtop.agents.exits._wait_status", lambda _pid, _descriptor: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = ExitWatch(process.pid)
        process.kill()
    wait_until(lambda: not watch.runs, "the end")

    told = watch.exit("worker (pid 7)", in_order=False, now_ns=1)

    assert (told.signal, told.exit_code, told.core_dumped) == (None, None, None)


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(("code", "status"), [("import os; os.abort()", "SIGABRT"), ("exit(7)", 7)])
def test_a_child_of_somebody_else_tells_how_it_ended_before_and_after_it_is_reaped(
    reaped: bool, code: str, status: str | int
) -> None:
    if reaped and not KEEPS_STATUS:
        pytest.skip("the kernel forgets how a reaped process ended")
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'input(); {code}'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.readline(); child.stdin.close; child.stdin.write(b'\\n'); child.stdin.flush()\n"
        "sys.stdin.readline(); child.wait(); print('reaped', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = ExitWatch(int(process.stdout.readline()))
        assert watch.runs
        process.stdin.write("\n")
        if reaped:
            process.stdin.write("\n")
            assert process.stdout.readline() == "reaped\n"
        wait_until(lambda: not watch.runs, "the end")
        told = watch.exit("it", in_order=False, now_ns=1)
        process.stdin.write("\n\n\n")

    assert (told.signal or told.exit_code) == status


def test_the_last_lines_of_its_log_are_kept_without_what_requests_said(
    paths: RuntimePaths, tmp_path: Path
) -> None:
    told = ended(paths, ending="exit", log=tmp_path / "engine.log").exit

    assert told is not None
    assert told.log_lines == [LOG_LINE, LEFT_OUT]
    assert told.log_note == ""


def test_no_log_line_is_kept_where_that_is_switched_off(paths: RuntimePaths, tmp_path: Path) -> None:
    told = ended(paths, "--no-engine-logs", ending="exit", log=tmp_path / "engine.log").exit

    assert told is not None
    assert told.log_lines == []
    assert told.log_note == "the agent runs with --no-engine-logs"


def test_an_engine_whose_output_goes_to_no_file_has_no_log_and_it_is_said_why(paths: RuntimePaths) -> None:
    told = ended(paths, ending="exit").exit

    assert told is not None
    assert (told.log_lines, told.log_note) == ([], "its output goes to no file")


def test_what_was_logged_before_the_engine_attached_is_not_taken_for_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{LOG_LINE} of an earlier one\n")
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"input(); print({LOG_LINE!r})"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
        kept = EngineLog(process.pid)
        process.communicate(b"\n")

    assert kept.tail() == [LOG_LINE]


def test_a_log_that_is_rotated_is_followed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    code = (
        "import os, sys; input(); f = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        f"os.dup2(f, 1); os.dup2(f, 2); os.close(f); input(); print({LOG_LINE!r})"
    )
    with old.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(new)], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        kept = EngineLog(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_until(lambda: Path(f"/proc/{process.pid}/fd/2").readlink() == new, "the rotation")
        kept.refresh()
        process.communicate(b"\n")

    assert kept.tail() == [LOG_LINE]


def test_of_a_log_only_its_bounded_end_is_kept() -> None:
    many = [f"{number} " + "x" * 150 for number in range(500)]

    kept = bounded(many)

    assert kept[-1] == many[-1]
    assert kept == many[-len(kept) :]
    assert len(kept) <= LINES_KEPT
    assert sum(len(line) + 1 for line in kept) <= BYTES_KEPT
    assert bounded(["short"] * 500) == ["short"] * LINES_KEPT


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=12) ERROR 12-06 10:00:00 [core.py:710] EngineCore encountered a fatal error.",
        "WARNING 12-06 10:00:00.123 [v1/engine/core.py:9] slow",
        "Traceback (most recent call last):",
        '(EngineCore pid=12)   File "core.py", line 7, in run',
        "RuntimeError: CUDA error: device-side assert triggered",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_the_engines_own_words_are_told(line: str) -> None:
    assert told(line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: the prompt 'how do I' is too long",
        "ERROR 12-06 10:00:00 [core.py:710] KeyError: 'how do I'",
        "(APIServer pid=1) INFO 12-06 10:00:00 [serving.py:9] Generated response a: output: 'x'",
        '(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1/x HTTP/1.1" 200 OK',
        "a poem about a raven",
        "An Error in a text is no line of an exception: but a text",
    ],
)
def test_what_may_be_a_requests_text_is_not_told(line: str) -> None:
    assert line not in told(line)


def test_an_exception_that_may_quote_a_request_is_told_by_its_name() -> None:
    assert told("ERROR 12-06 10:00:00 [core.py:710] json.JSONDecodeError: Expecting: 'how do I'") == [
        "ERROR 12-06 10:00:00 [core.py:710] json.JSONDecodeError"
    ]


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/pod/a\n", "pod/a/memory.events", "low 0\noom 3\noom_kill 2\n"),
        (
            "4:hugetlb,memory:/pod/a\n0::/\n",
            "memory/pod/a/memory.oom_control",
            "under_oom 0\noom_kill 2\n",
        ),
    ],
)
def test_the_kernels_count_of_memory_kills_is_found_in_either_kind_of_cgroup(
    tmp_path: Path, cgroup: str, file: str, content: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(cgroup)
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 40\n")
    assert oom_count(oom_count_file(7, proc, cgroups)) == 40  # no cgroup is mounted: the node's count

    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(content)

    assert oom_count(oom_count_file(7, proc, cgroups)) == 2


def test_a_kill_for_lack_of_memory_is_seen_by_the_count_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "memory.events"
    counts.write_text("oom_kill 4\n")
    monkeypatch.setattr("kvtop.agents.exits.oom_count_file", lambda _pid: counts)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ExitWatch(process.pid)
    counts.write_text("oom_kill 5\n")
    process.kill()
    process.communicate()
    wait_until(lambda: not watch.runs, "the end")

    told: Exit = watch.exit("worker (pid 7)", in_order=False, now_ns=1)

    assert told.oom_kills == 1


def test_a_watch_holds_no_descriptor_after_the_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    watch = ExitWatch(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not watch.runs, "the end")
    watch.exit("it", in_order=False, now_ns=1)

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    process.communicate()


def test_a_stopped_engine_is_said_not_to_report_and_why(paths: RuntimePaths) -> None:
    with running_agent(paths), child_engine("wait") as engine:
        await_snapshot(paths, lambda seen: seen.instances, "the engine")
        engine.send_signal(signal.SIGSTOP)

        seen = await_snapshot(paths, lambda seen: seen.instances[0].state == "stale", "it to be missed")

        (instance,) = seen.instances
        assert f"engine-core (pid {engine.pid}) is stopped" in instance.state_reason
        assert instance.state_since_ns < seen.node.clock.monotonic_ns
        wait_until(lambda: snapshot(paths).instances[0].processes[0].status == "stopped", "the sample")

        engine.send_signal(signal.SIGCONT)
        await_snapshot(paths, lambda seen: seen.instances[0].state != "stale", "it to report again")
