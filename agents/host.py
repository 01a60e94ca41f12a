"""The node and its engine processes as the kernel counts them, sampled every other second.

Reading is psutil's. It happens on a thread of its own: what hangs in the kernel (a file system that does not
answer) costs this sample and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import psutil

from kvtop.agents.events import Process
from kvtop.agents.facts import Host, ProcessStats
from kvtop.agents.latency import NS

logger = logging.getLogger("kvtop.agent")

SAMPLE_S: Final = 2.0
BUSY_PERCENT: Final = 90.0
_T = TypeVar("_T")


class Watched(NamedTuple):
    """One engine process that is to be sampled."""

    pid: int
    process: Process
    rank: int


def status_of(pid: int) -> str | None:
    """Return psutil's word for what a process does; None where it is gone or cannot be read."""
    return _known(lambda: str(psutil.Process(pid).status()))


class Sampler:
    """Reads the node and processes, each figure by itself: one that cannot be read is None."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the one whose file system is looked at."""
        self._folder = folder
        self._processes: dict[int, psutil.Process] = {}
        psutil.cpu_percent(percpu=True)  # the first call only begins to count

    def host(self) -> Host:
        """Read the node."""
        now_ns = time.monotonic_ns()
        cores = _known(lambda: psutil.cpu_percent(percpu=True)) or []
        load = _known(os.getloadavg)
        memory, swap = _known(psutil.virtual_memory), _known(psutil.swap_memory)
        disk = _known(lambda: psutil.disk_usage(os.fspath(self._folder)))
        booted_s = _known(psutil.boot_time)
        return Host(
            sampled_ns=now_ns,
            booted_wall_ns=round(booted_s * NS) if booted_s else None,
            uptime_s=_known(lambda: round(time.clock_gettime(time.CLOCK_BOOTTIME), 1)),
            cores=len(cores) or None,
            cpu_percent=round(sum(cores) / len(cores), 1) if cores else None,
            busiest_core_percent=max(cores, default=None),
            busy_cores=sum(each >= BUSY_PERCENT for each in cores) if cores else None,
            load_1m=round(load[0], 2) if load else None,
            load_5m=round(load[1], 2) if load else None,
            load_15m=round(load[2], 2) if load else None,
            memory_total_bytes=memory.total if memory else None,
            memory_available_bytes=memory.available if memory else None,
            swap_total_bytes=swap.total if swap else None,
            swap_used_bytes=swap.used if swap else None,
            disk_total_bytes=disk.total if disk else None,
            disk_free_bytes=disk.free if disk else None,
        )

    def processes(self, watched: Iterable[Watched]) -> dict[int, ProcessStats]:
        """Read these processes; return them by pid. Those that are named no more are forgotten."""
        wanted = {each.pid: each for each in watched}
        for pid in self._processes.keys() - wanted.keys():
            del self._processes[pid]
        return {pid: self._process(each) for pid, each in wanted.items()}

    def _process(self, of: Watched) -> ProcessStats:
        found = self._processes.get(of.pid)
        first = found is None or not _known(found.is_running)
        if first:
            found = _known(lambda: psutil.Process(of.pid))
        if found is None:
            self._processes.pop(of.pid, None)
            return ProcessStats(pid=of.pid, process=of.process, rank=of.rank)
        self._processes[of.pid] = process = found
        with process.oneshot():
            used = _known(process.cpu_percent)
            memory = _known(process.memory_info)
            return ProcessStats(
                pid=of.pid,
                process=of.process,
                rank=of.rank,
                status=_known(lambda: str(process.status())),
                cpu_percent=None if first else used,
                rss_bytes=memory.rss if memory else None,
                threads=_known(process.num_threads),
                open_files=_known(process.num_fds),
                open_files_limit=_limit(process, resource.RLIMIT_NOFILE),
                locked_memory_limit_bytes=_limit(process, resource.RLIMIT_MEMLOCK),
            )


def _limit(process: psutil.Process, which: int) -> int | None:
    """Return a soft limit, -1 for none (RLIM_INFINITY)."""
    limits = _known(lambda: process.rlimit(which))
    return int(limits[0]) if limits else None


def _known(read: Callable[[], _T]) -> _T | None:
    """Return what can be read, None where it cannot."""
    try:
        return read()
    except (psutil.Error, OSError, ValueError, RuntimeError, NotImplementedError):
        return None


async def sample_host(
    folder: Path,
    watched: Callable[[], list[Watched]],
    sampled: Callable[[Host, dict[int, ProcessStats]], None],
) -> None:
    """Sample the node and the processes that are `watched` at that moment, until cancelled."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="kvtop-host")
    sampler = Sampler(folder)
    try:
        while True:
            await asyncio.sleep(SAMPLE_S)
            try:
                sampled(
                    await loop.run_in_executor(thread, sampler.host),
                    await loop.run_in_executor(thread, sampler.processes, watched()),
                )
            except Exception:
                logger.exception("a bug in kvtop kept the node from being sampled; please report it")
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
