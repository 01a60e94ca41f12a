"""A process that owns what the demo starts, and ends all of it when the demo ends, however that happens.

Run as `python -m kvtop.console.demo.guardian`. It is made a child subreaper, so whatever its children start,
double-forked daemons included, stays among its descendants. It takes requests as JSON lines on stdin and
answers each on stdout. The end of stdin is the order to end: the kernel closes the pipe even when the demo
was killed, so no process and no file outlives it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil

PR_SET_CHILD_SUBREAPER: Final = 36
TERM_GRACE_S: Final = 5.0
"""How long a process may take to end in order before it is killed."""
KILL_GRACE_S: Final = 10.0
"""How long what was killed may take to go."""
SELF_ENDING: Final = "multiprocessing.resource_tracker"
"""Python's trackers remove the semaphores and shared memory of processes that were killed, and then end by
themselves: they are not killed."""
LONGEST_PARENT: Final = 40
"""Longest path in which the folder is made: Unix socket paths below it must stay under 108 bytes."""


class Guardian:
    """The children, by name, and how they ended."""

    def __init__(self, folder: Path) -> None:
        """Keep the children's logs in `folder`/logs."""
        self.folder = folder
        self.pids: dict[int, str] = {}
        self.outliving: set[int] = set()
        self.exit_codes: dict[str, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request asks."""
        if "spawn" not in request:
            self.reap()
            return {"exit_codes": self.exit_codes}
        try:
            return {"pid": self.spawn(**request["spawn"])}
        except OSError as error:
            return {"error": f"{error.strerror}: {error.filename or request['spawn']['argv'][0]}"}

    def spawn(self, name: str, argv: list[str], env: dict[str, str], log: str, outlives: bool) -> int:
        """Start a process in a session of its own, its output appended to `log`.

        A process that `outlives` is ended only after all others are gone.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        pid = os.posix_spawnp(
            argv[0],
            argv,
            env,
            file_actions=actions,
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
        )
        self.pids[pid] = name
        self.exit_codes.pop(name, None)
        if outlives:
            self.outliving.add(pid)
        return pid

    def reap(self) -> None:
        """Collect every child, own or adopted, that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self.pids.pop(pid, None)
            if name is not None:
                self.exit_codes[name] = os.waitstatus_to_exitcode(status)

    def end_all(self) -> list[str]:
        """End every descendant, and return the command lines of those that could not be ended."""
        spared = [psutil.Process(pid) for pid in self.outliving if psutil.pid_exists(pid)]
        self._end(spared)
        return self._end([])

    def _end(self, spared: list[psutil.Process]) -> list[str]:
        asked: set[int] = set()
        began = time.monotonic()
        while time.monotonic() < began + TERM_GRACE_S + KILL_GRACE_S:
            self.reap()
            children = [child for child in _children() if child not in spared]
            if not children:
                return []
            if time.monotonic() < began + TERM_GRACE_S:
                fresh = [child for child in children if child.pid not in asked]
                asked.update(child.pid for child in fresh)
                _signal(fresh, signal.SIGTERM)
            else:
                below = (each for child in children for each in _below(child))
                doomed = [each for each in (*children, *below) if SELF_ENDING not in _command_line(each)]
                _signal(doomed, signal.SIGKILL)
            time.sleep(0.02)
        return [_command_line(child) for child in _children() if child not in spared]


def _children() -> list[psutil.Process]:
    """Return direct children: orphans below them become direct children in their turn."""
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return f"process {process.pid}"


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _make_folder() -> Path:
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="kvtop-", dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))


def _say(message: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the demo is gone: there is nobody to tell


def _leave(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """Serve requests until stdin ends; then end all and remove the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true", help="leave the folder with the logs")
    keep: bool = parser.parse_args().keep
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    _become_subreaper()
    folder = _make_folder()
    guardian = Guardian(folder)
    left: list[str] = []
    try:
        _say({"folder": str(folder)})
        for line in sys.stdin:
            _say(guardian.answer(json.loads(line)))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = guardian.end_all()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        _say({"left": left})


if __name__ == "__main__":
    main()
