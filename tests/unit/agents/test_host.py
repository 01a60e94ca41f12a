"""What the agent says of its node and of the engines' processes is what their kernel counts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtop.agents.facts import ProcessStats
from kvtop.agents.host import Sampler, Watched
from kvtop.agents.mirror import Mirror
from kvtop.agents.model import Delta, Snapshot
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import await_snapshot, hello, reporting, running_agent, runtime_folder


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


def test_the_node_is_told_as_its_kernel_counts_it(tmp_path: Path) -> None:
    host = Sampler(tmp_path).host()

    assert host.cores == psutil.cpu_count()
    assert host.memory_total_bytes == psutil.virtual_memory().total
    assert host.disk_total_bytes == psutil.disk_usage(str(tmp_path)).total
    assert host.booted_wall_ns == pytest.approx(psutil.boot_time() * 1e9, abs=2e9)
    assert host.load_1m is not None
    assert host.uptime_s is not None
    assert host.busiest_core_percent is not None
    assert host.cpu_percent is not None
    assert 0 <= host.cpu_percent <= host.busiest_core_percent <= 100


def test_a_folder_that_cannot_be_looked_at_leaves_its_figures_unknown(tmp_path: Path) -> None:
    host = Sampler(tmp_path / "nowhere").host()

    assert (host.disk_total_bytes, host.disk_free_bytes) == (None, None)
    assert host.memory_total_bytes is not None


def test_a_process_is_told_with_its_limits() -> None:
    code = (
        "import resource, threading, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (123, 123))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))\n"
        "threading.Thread(target=input).start()\n"
        "files = [open('/dev/null') for _ in range(20)]; print('ready', flush=True)\n"
    )
    sampler = Sampler(Path("/"))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        watched = [Watched(process.pid, "worker", 1)]
        first = sampler.processes(watched)[process.pid]
        second = sampler.processes(watched)[process.pid]
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()

    assert (second.process, second.rank, second.status) == ("worker", 1, "sleeping")
    assert (second.open_files_limit, second.locked_memory_limit_bytes) == (123, 4096)
    assert second.threads == 2
    assert second.open_files == 23
    assert second.rss_bytes is not None
    assert second.rss_bytes > 1 << 20
    assert first.cpu_percent is None  # there is no sample before the first
    assert second.cpu_percent is not None


def test_no_limit_is_told_apart_from_an_unknown_one() -> None:
    stats = Sampler(Path("/")).processes([Watched(os.getpid(), "worker", 0)])[os.getpid()]

    assert stats.locked_memory_limit_bytes == resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def test_a_process_that_is_gone_has_unknown_figures() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    sampler = Sampler(Path("/"))
    watched = [Watched(process.pid, "worker", 0)]
    sampler.processes(watched)
    process.wait()

    assert sampler.processes(watched) == {process.pid: ProcessStats(pid=process.pid, process="worker")}


def test_a_busy_process_is_seen_to_be_busy() -> None:
    sampler = Sampler(Path("/"))
    watched = [Watched(os.getpid(), "worker", 0)]
    sampler.processes(watched)
    until = threading.Event()
    spinning = threading.Thread(target=lambda: [None for _ in iter(until.is_set, True)])
    spinning.start()
    began_s = psutil.Process().cpu_times().user
    while psutil.Process().cpu_times().user < began_s + 0.2:
        pass
    until.set()
    spinning.join()

    used = sampler.processes(watched)[os.getpid()].cpu_percent

    assert used is not None
    assert used > 20


def test_consoles_are_told_of_the_node_and_its_engines_processes(paths: RuntimePaths) -> None:
    with running_agent(paths), reporting(paths, start_agent=False):
        seen = await_snapshot(
            paths, lambda seen: seen.host and seen.instances[0].processes, "the first sample"
        )

    assert seen.host is not None
    assert seen.host.cores == psutil.cpu_count()
    (stats,) = seen.instances[0].processes
    assert (stats.pid, stats.process) == (os.getpid(), "api-server")


def test_a_process_that_the_agent_cannot_see_is_not_taken_for_another(paths: RuntimePaths) -> None:
    """In another pid namespace an engine says another pid than the kernel tells the agent."""
    elsewhere = hello(pid=1)
    with running_agent(paths), reporting(paths, start_agent=False, hello=elsewhere):
        seen = await_snapshot(
            paths, lambda seen: seen.instances and seen.instances[0].processes, "the first sample"
        )

    (instance,) = seen.instances
    assert instance.pids == [1]
    assert [each.pid for each in instance.processes] == [os.getpid()]


def test_a_delta_without_a_host_leaves_the_known_one() -> None:
    from kvtop.agents.server import Agent

    node, host, mirror = Agent().node(), Sampler(Path("/")).host(), Mirror()

    mirror.apply(Snapshot(node=node, host=host))
    mirror.apply(Delta(node=node))
    assert mirror.host == host

    mirror.apply(Snapshot(node=node))
    assert mirror.host is None
