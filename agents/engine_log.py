"""The last log lines of an engine process that died, where its output goes to a file that this user may read.

The file is opened while the process lives, through its own descriptors, and read once after its end. Only
lines in vLLM's own log format and Python's tracebacks are taken, and none that may hold a request's text.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from kvtop.agents.text import printable

LINES_KEPT: Final = 20
BYTES_KEPT: Final = 4096
LINE_CHARACTERS: Final = 300
READ_BYTES: Final = 1 << 16
PROC: Final = Path("/proc")

_PROCESS: Final = r"(?:\([\w .:-]{1,60} pid=\d+\) )?"
_VLLM: Final = re.compile(
    _PROCESS + r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*:\d+\] "
)
_TRACEBACK: Final = re.compile(
    _PROCESS
    + r"(?:Traceback \(most recent call last\)|Fatal Python error: |(?:Current thread|Thread) 0x|"
    + r'  File "[^"]+", line \d+)'
)
_EXCEPTION: Final = re.compile(r"((?:[\w]+\.)*(\w*(?:Error|Exception|Interrupt|Exit)))(?:: .*|$)")
_OF_THE_MACHINE: Final = (
    *("RuntimeError", "AcceleratorError", "OutOfMemoryError", "MemoryError", "OSError", "ImportError"),
    *("ConnectionError", "ConnectionResetError", "BrokenPipeError", "TimeoutError", "EngineDeadError"),
    *("KeyboardInterrupt", "SystemExit"),
)
"""Exceptions whose words are told. Of others only the name is: they may quote what they failed on."""
_REQUEST: Final = re.compile(
    r"prompt|token_ids|output|generated|messages|content|request_logger|received request|json body"
    r"|completion",
    re.IGNORECASE,
)
"""What a line says that may quote a request or its answer: a line too many is left out rather than one too
few."""
LEFT_OUT: Final = "(a line that may quote a request was left out)"


class EngineLog:
    """The output files of one process."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        """Find and open them; see `note` for why there are none."""
        self._pid, self._proc = pid, proc
        self._files: dict[tuple[int, int], tuple[int, int]] = {}
        """By device and inode: our descriptor, and where the file ended when we first saw it."""
        self.note = ""
        self.refresh()

    def refresh(self) -> None:
        """Follow the process to the files that it writes to now, e.g. after a rotation."""
        current: dict[tuple[int, int], tuple[int, int]] = {}
        for number in (1, 2):
            path = self._proc / str(self._pid) / "fd" / str(number)
            try:
                found = path.stat()
                key = found.st_dev, found.st_ino
                if not stat.S_ISREG(found.st_mode):
                    self.note = self.note or "its output goes to no file"
                elif key not in current:
                    current[key] = self._files.pop(key) if key in self._files else _open(path)
            except OSError as error:
                self.note = f"its output cannot be read: {error.strerror}"
        if not current and self._files:
            return  # it has just ended
        self.close()
        self._files = current

    def tail(self) -> list[str]:
        """Return the last lines that may be shown, and let go of the files."""
        lines: list[str] = []
        for descriptor, began in self._files.values():
            with contextlib.suppress(OSError):
                size = os.fstat(descriptor).st_size
                start = max(began if began <= size else 0, size - READ_BYTES)
                lines += told(os.pread(descriptor, READ_BYTES, start).decode("utf-8", "replace"))
        if self._files and not lines:
            self.note = "no line of vLLM's own was written since it attached"
        elif lines:
            self.note = ""
        self.close()
        return bounded(lines)

    def close(self) -> None:
        """Let go of the files."""
        for descriptor, _ in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files = {}


def _open(path: Path) -> tuple[int, int]:
    """Open a process's output file for reading; a fifo that has taken its place would not keep us waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no file any more")
    return descriptor, found.st_size


def told(text: str) -> list[str]:
    r"""Return the lines of an engine's output that may be shown.

    >>> told("hello\nERROR 12-06 10:00:00 [core.py:7] EngineCore failed\n")
    ['ERROR 12-06 10:00:00 [core.py:7] EngineCore failed']
    >>> told("INFO 12-06 10:00:00 [logger.py:7] Received request a: prompt: 'x'\nnot vLLM's\n")
    ['(a line that may quote a request was left out)']
    """
    lines: list[str] = []
    for line in text.splitlines():
        prefix = _VLLM.match(line) or re.match(_PROCESS, line)
        said = line[prefix.end() :] if prefix else line
        failed = _EXCEPTION.match(said)
        if not (failed or _VLLM.match(line) or _TRACEBACK.match(line)):
            continue
        if failed and failed[2] not in _OF_THE_MACHINE:
            line = line.removesuffix(said) + failed[1]  # noqa: PLW2901
        if not _REQUEST.search(line):
            lines.append(printable(line[:LINE_CHARACTERS]))
        elif lines[-1:] != [LEFT_OUT]:
            lines.append(LEFT_OUT)
    return lines


def bounded(lines: list[str]) -> list[str]:
    """Return the last lines, `LINES_KEPT` and `BYTES_KEPT` at most."""
    kept: list[str] = []
    room = BYTES_KEPT
    for line in reversed(lines[-LINES_KEPT:]):
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return kept
