"""What a command leaves behind: its processes carry a mark, and its files go to folders of ours."""

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


class Traces:
    """An environment for a command, and what is left of the command in it."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.home, self.tmp = folder / "home", folder / "tmp"
        for made in (self.home, self.tmp):
            made.mkdir()

    @property
    def environment(self) -> Mapping[str, str]:
        """A HOME and a TMPDIR that are empty, and the mark that all descendants inherit."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "KVTOP_"))}
        return {**kept, "HOME": str(self.home), "TMPDIR": str(self.tmp), MARK: self.mark}

    def processes(self) -> list[str]:
        """Return the command lines of the marked processes that run."""
        return [" ".join(process.cmdline()) for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark
        except (psutil.Error, OSError):
            return False

    def files(self) -> list[str]:
        """Return everything in HOME and TMPDIR."""
        return [str(path) for folder in (self.home, self.tmp) for path in folder.rglob("*")]

    def assert_nothing_left(self, timeout_s: float = 40.0) -> None:
        """Fail, naming it, if a process or a file of the command is there after `timeout_s`."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), "every process to end", timeout_s=timeout_s)
        assert self.processes() == []
        assert self.files() == []


@contextmanager
def traces() -> Iterator[Traces]:
    """Provide an environment whose paths are short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    try:
        yield Traces(folder)
    finally:
        shutil.rmtree(folder)
