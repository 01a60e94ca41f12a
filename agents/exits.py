"""How an engine process ended, as far as one who is not its parent can know.

A pidfd, opened while the process is attached, tells when it ended, and cannot be fooled by a pid that is used
again. Its status is then where one of these has it: the process itself while nobody has reaped it (waitid
for our own children, /proc/PID/stat for those of others), or the kernel behind the pidfd after that (Linux
6.15 and later). What none of them says stays unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Final

from kvtop.agents.engine_log import PROC, EngineLog
from kvtop.agents.facts import Exit
from kvtop.agents.host import status_of
from kvtop.agents.oom import oom_count, oom_count_file
from kvtop.agents.text import plural

_PIDFD_INFO: Final = struct.Struct("=QQ" + "I" * 11 + "i")
"""`struct pidfd_info` of linux/pidfd.h: mask, cgroup id, three pids, eight uids and gids, exit code."""
_PIDFD_GET_INFO: Final = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT: Final = 1 << 3
SAMPLE_NS: Final = 5_000_000_000
OOM_BEFORE_SAMPLES: Final = 2
"""How many samples old the count is that the last one is compared with: 5 to 10 s."""


class ExitWatch:
    """One engine process, from its hello to its end."""

    def __init__(self, pid: int, *, no_logs: str = "", ended: Callable[[], None] | None = None) -> None:
        """Watch `pid`, this node's; call `ended` on the running event loop when it ends.

        `no_logs` says why its log is not looked at; empty, it is.
        """
        self.pid = pid
        self.ended_ns: int | None = None
        self.wait_status: int | None = None
        self._ended = ended
        self._descriptor = _open_pidfd(pid)
        self._no_logs = no_logs
        self._log = None if no_logs else EngineLog(pid)
        self._sampled_ns = time.monotonic_ns()
        self._oom_file = oom_count_file(pid)
        self._oom_counts = [oom_count(self._oom_file)]
        self._exit: Exit | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._descriptor is not None and ended is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs: it is asked instead
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._descriptor, self._on_end)

    @property
    def runs(self) -> bool:
        """Whether the process is more than an unreaped entry."""
        if self.ended_ns is not None:
            return False
        if self._descriptor is None:
            return status_of(self.pid) not in (None, "zombie")
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(0):
            return True
        self._note_end()
        return False

    def sample(self) -> None:
        """Take note, now and then, of what can only be learned while the process lives."""
        now_ns = time.monotonic_ns()
        if self.ended_ns is None and now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sampled_ns = now_ns
            self._oom_counts = [*self._oom_counts, oom_count(self._oom_file)][-OOM_BEFORE_SAMPLES:]
            if self._log is not None:
                self._log.refresh()

    def exit(self, label: str, *, in_order: bool, now_ns: int) -> Exit:
        """Return how it ended; to be called once it runs no more, or is taken for lost at `now_ns`."""
        if self._exit is None:
            if self.wait_status is None and self.ended_ns is not None and self._descriptor is not None:
                self.wait_status = _wait_status(self.pid, self._descriptor)  # reaped by now, maybe
            died, code = _understood(self.wait_status)
            lines = self._log.tail() if self._log is not None else []
            note = self._log.note if self._log is not None else self._no_logs
            self._exit = Exit(
                process=label,
                pid=self.pid,
                at_ns=self.ended_ns or now_ns,
                in_order=in_order,
                signal=died,
                exit_code=code,
                core_dumped=None if self.wait_status is None else bool(self.wait_status & 0x80),
                oom_kills=self._oom_kills(),
                log_lines=lines,
                log_note=note,
            )
            self.close()
        return self._exit

    def _oom_kills(self) -> int | None:
        before, after = self._oom_counts[0], oom_count(self._oom_file)
        if after is None and self._oom_file is not None:  # its cgroup went with it
            after = self._oom_counts[-1]
        return None if before is None or after is None else max(0, after - before)

    def close(self) -> None:
        """Watch no more."""
        if self._descriptor is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        if self._log is not None:
            self._log.close()

    def _on_end(self) -> None:
        if self._loop is not None and self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
        self._note_end()
        if self._ended is not None:
            self._ended()

    def _note_end(self) -> None:
        """Remember when it ended and, at once, before it is reaped, how."""
        if self.ended_ns is None and self._descriptor is not None:
            self.ended_ns = time.monotonic_ns()
            self.wait_status = _wait_status(self.pid, self._descriptor)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # it is gone, or the kernel is older than 5.3
        return None


def _wait_status(pid: int, descriptor: int) -> int | None:
    """Return the status of a process that has ended as wait(2) would; None where nobody tells it to us."""
    with contextlib.suppress(OSError):  # it is no child of ours
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            dumped = 0x80 if ended.si_code == os.CLD_DUMPED else 0
            return ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status | dumped
    for _ in range(2):  # it may be reaped between the two
        for status in (_reaped(descriptor), _zombie(pid)):
            if status is not None:
                return status
    return None


def _zombie(pid: int) -> int | None:
    """Return the status in /proc/PID/stat (its 52nd field), which is there until the process is reaped.

    It is 0 for who may not see it; the link to its program, gone by then, is guarded alike, and says so.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        try:
            (PROC / str(pid) / "exe").readlink()
        except FileNotFoundError:
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return int(fields[49]) if fields[0] == "Z" else None
    return None


def _reaped(descriptor: int) -> int | None:
    """Return the status that the kernel keeps behind a pidfd once the process was reaped (Linux 6.15)."""
    told = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, told)
        mask, *_, status = _PIDFD_INFO.unpack(told)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    return None


def _understood(status: int | None) -> tuple[str | None, int | None]:
    """Return the signal or the exit code in a wait status.

    >>> _understood(9), _understood(0x8B), _understood(3 << 8), _understood(None)
    (('SIGKILL', None), ('SIGSEGV', None), (None, 3), (None, None))
    """
    if status is None:
        return None, None
    number = status & 0x7F
    if not number:
        return None, status >> 8 & 0xFF
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name, None
    return f"signal {number}", None


def sentence(of: Exit) -> str:
    """Return how a process ended, for people.

    >>> died = Exit(process="worker (pid 7)", pid=7, at_ns=1, in_order=False, signal="SIGKILL", oom_kills=1)
    >>> sentence(died)
    'worker (pid 7) was killed by SIGKILL; the kernel killed 1 process for lack of memory just then'
    """
    if of.signal is not None:
        dumped = " and dumped core" if of.core_dumped else ""
        how = f"{of.process} was killed by {of.signal}{dumped}"
    elif of.exit_code:
        how = f"{of.process} ended with exit code {of.exit_code}"
    elif of.exit_code == 0 and not of.in_order:
        how = f"{of.process} ended by itself (exit code 0) without saying so"
    else:
        how = "shut down in order" if of.in_order else f"{of.process} ended without a word"
    if of.oom_kills:
        how += (
            f"; the kernel killed {plural(of.oom_kills, 'process', 'processes')} for lack of memory just then"
        )
    return how
