"""What a command leaves behind: its processes carry a mark, and its files go to folders of ours.

A process that renames itself wipes its environment, and the mark with it (vLLM's EngineCore does). Such a
one is known by its output, which goes to a log in our folder even when that has been removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

MARK = "KVTOP_TEST_MARK"
SHARED_MEMORY = Path("/dev/shm")


class Traces:
    """An environment for a command, and what is left of the command in it."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._shared: set[int] = set()
        self.home, self.tmp = folder / "home", folder / "tmp"
        for made in (self.home, self.tmp):
            made.mkdir()

    @property
    def environment(self) -> Mapping[str, str]:
        """A HOME and a TMPDIR that are empty, and the mark that all descendants inherit."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "KVTOP_"))}
        return {**kept, "HOME": str(self.home), "TMPDIR": str(self.tmp), MARK: self.mark}

    def processes(self) -> list[str]:
        """Return the command lines of the command's processes that run."""
        return [line for process in psutil.process_iter() if (line := self._line_of_ours(process))]

    def watch(self) -> bool:
        """Look what our processes use at this moment; what is left of that is found later. Always true."""
        self.processes()
        return True

    def _note_shared_memory(self, process: psutil.Process) -> None:
        """Note the inodes: a named semaphore is mapped by the name of the file that was linked to its own."""
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            inode, _, name = line.split(maxsplit=4)[4].partition(" ")
            if name.strip().startswith(f"{SHARED_MEMORY}/"):
                self._shared.add(int(inode))

    def _line_of_ours(self, process: psutil.Process) -> str | None:
        try:
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
            ours = process.environ().get(MARK) == self.mark or output.is_relative_to(self.tmp)
            if not ours:
                return None
            self._note_shared_memory(process)
            return " ".join(process.cmdline()).strip()
        except (psutil.Error, OSError):
            return None

    def files(self) -> list[str]:
        """Return everything in HOME and TMPDIR, and the shared memory that our processes were seen to use."""
        found = [path for folder in (self.home, self.tmp) for path in folder.rglob("*")]
        shared = [path for path in SHARED_MEMORY.iterdir() if path.stat().st_ino in self._shared]
        return [str(path) for path in (*found, *shared)]

    def assert_nothing_left(self, timeout_s: float = 40.0) -> None:
        """Fail, naming it, if a process or a file of the command is there after `timeout_s`."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), "every process to end", timeout_s=timeout_s)
        left = self.processes() + self.files()
        assert not left, f"left behind: {left}"


@contextmanager
def traces() -> Iterator[Traces]:
    """Provide an environment whose paths are short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    try:
        yield Traces(folder)
    finally:
        shutil.rmtree(folder)
