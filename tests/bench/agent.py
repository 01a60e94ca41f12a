"""What the node agent costs under simulated load: processor time, memory, and time until it serves."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import Final

import msgspec
import psutil

from kvtop.agents.client import connect_unix
from kvtop.agents.model import Snapshot
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import await_snapshot, running_agent, runtime_folder
from tests.support.traffic import Sent

CONSOLES: Final = 4
STARTS: Final = 7
SECONDS: Final = 20.0
BURST_SECONDS: Final = 8.0
MIB: Final = 1 << 20


def measure() -> Iterator[str]:
    """Yield the time until an agent serves, and what 1,000 and 10,000 transfers a second cost it."""
    start_s = statistics.median(_start_s() for _ in range(STARTS))
    yield f"start to serving: median {start_s:.2f} s ({STARTS} starts)"
    for consoles in (0, CONSOLES):
        yield _loaded(1_000, SECONDS, consoles)
    yield _loaded(10_000, BURST_SECONDS, CONSOLES)


def _start_s() -> float:
    with runtime_folder() as paths:
        began_s = time.perf_counter()
        with running_agent(paths):
            await_snapshot(paths, lambda _: True, "the agent to serve")
            return time.perf_counter() - began_s


def _loaded(rate_per_s: int, seconds: float, consoles: int) -> str:
    """Load an agent; return what it took of a core and of memory, and whether anything was lost."""
    with runtime_folder() as paths, running_agent(paths) as process, _watching(paths, consoles):
        agent = psutil.Process(process.pid)
        command = [sys.executable, "-m", "tests.support.traffic", str(paths.folder)]
        options = ["--rate", str(rate_per_s), "--seconds", str(seconds)]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as traffic:
            await_snapshot(paths, lambda seen: seen.node.transfers_done, "the first transfer")
            started_s, used_s = time.perf_counter(), _cpu_s(agent)
            early = agent.memory_info().rss
            wait_s = seconds - 2
            time.sleep(wait_s)
            share = (_cpu_s(agent) - used_s) / (time.perf_counter() - started_s)
            late = agent.memory_info().rss
            answer, _ = traffic.communicate()
        sent = msgspec.json.decode(answer, type=Sent)
        seen = await_snapshot(paths, lambda seen: _all_told(seen, sent), "all that was sent")
    shown = sum(each.dropped_events for each in seen.instances)
    return (
        f"{rate_per_s} transfers/s asked, {sent.transfers / sent.seconds:.0f} sent, "
        f"{consoles} consoles at 1 Hz: {100 * share:.1f} % of a core, "
        f"{1e6 * share * sent.seconds / sent.transfers:.0f} µs a transfer; "
        f"RSS {early / MIB:.0f} MiB, then {late / MIB:.0f} MiB; "
        f"done {seen.node.transfers_done} of {sent.transfers}, "
        f"events dropped {sent.dropped}, shown as dropped {shown}; the load itself took {sent.cpu_s:.1f} s"
    )


def _all_told(seen: Snapshot, sent: Sent) -> bool:
    shown = sum(each.dropped_events for each in seen.instances)
    return shown == sent.dropped and (sent.dropped > 0 or seen.node.transfers_done == sent.transfers)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _watching(paths: RuntimePaths, consoles: int) -> Iterator[None]:
    """Let consoles follow the agent, in a process of their own."""
    if not consoles:
        yield
        return
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    watcher = context.Process(target=_watch, args=(paths, consoles, ready), daemon=True)
    watcher.start()
    assert ready.wait(30), "the consoles did not attach"
    try:
        yield
    finally:
        watcher.terminate()
        watcher.join(10)


def _watch(paths: RuntimePaths, consoles: int, ready: Event) -> None:
    async def one() -> None:
        async with await connect_unix(paths.view) as connection:
            async for _ in connection.updates(1.0):
                ready.set()

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(consoles)))

    asyncio.run(all_of_them())
