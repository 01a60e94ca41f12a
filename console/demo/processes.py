"""The demo's side of its guardian: start processes, see them end, end them all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtop.console.fleet.errors import KvtopError

END_TIMEOUT_S = 60.0
"""Longer than the guardian needs for its two rounds of asking and killing."""

_GUARDIAN = [sys.executable, "-P", "-m", "kvtop.console.demo.guardian"]


class DemoError(KvtopError):
    """The demo cannot go on; the message says what happened and what to do.

    DemoError
    ├── ProcessFailed   a process could not start or ended by itself
    └── NotReady        a process did not become ready in time
    """


class ProcessFailed(DemoError):
    """A process of the demo could not start, or ended although it should run."""


class NotReady(DemoError):
    """A process of the demo did not become ready in time."""


@dataclass(frozen=True)
class Running:
    """One started process."""

    name: str
    pid: int
    log: Path

    def tail(self, lines: int = 15) -> str:
        """Return the end of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "(no output)"
        return "\n".join(text.splitlines()[-lines:]) or "(no output)"


class Processes:
    """Everything that was started here. As a context manager it ends all of it on the way out."""

    def __init__(self, *, keep: bool = False) -> None:
        """With `keep`, the folder with the logs stays."""
        self._keep = keep
        self._guardian: subprocess.Popen[str] | None = None
        self._running: dict[str, Running] = {}

    def open(self) -> Self:
        """Start the guardian, which makes the throw-away folder (mode 0700)."""
        self._guardian = subprocess.Popen(
            [*_GUARDIAN, "--keep"] if self._keep else _GUARDIAN,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.folder = Path(self._receive()["folder"])
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        return self

    def __enter__(self) -> Self:
        """Open."""
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End every process and remove the folder.

        Raises:
            DemoError: something could not be ended; the message names it.
        """
        if self._guardian is None or self._guardian.stdin is None or self._guardian.stdin.closed:
            return
        try:
            output, _ = self._guardian.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the guardian (pid {self._guardian.pid}) does not end: kill it") from None
        if not output and self._running:
            self._end_without_guardian()
        elif output and (left := json.loads(output.splitlines()[-1])["left"]):
            raise DemoError("could not be ended: " + "; ".join(left))

    def _end_without_guardian(self) -> None:
        """Kill what a guardian that was killed has left: each process leads a group of its own."""
        for running in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        outlives: bool = False,
    ) -> Running:
        """Start a process with this process's environment changed by `env`.

        Raises:
            ProcessFailed: the command cannot be run.
        """
        log = self.logs / f"{name}.log"
        spawn = {
            "name": name,
            "argv": list(argv),
            "env": {**os.environ, **(env or {})},
            "log": str(log),
            "outlives": outlives,
        }
        answer = self._ask({"spawn": spawn})
        if "error" in answer:
            raise ProcessFailed(f"{name} cannot be started: {answer['error']}")
        self._running[name] = Running(name, answer["pid"], log)
        return self._running[name]

    def exit_code(self, name: str) -> int | None:
        """Return how the process ended (negative: the signal), or None while it runs."""
        code: int | None = self._ask({})["exit_codes"].get(name)
        return code

    def check(self, *names: str) -> None:
        """Raise ProcessFailed, with the end of the log, if one of these processes has ended."""
        ended = self._ask({})["exit_codes"]
        for name in names:
            if name in ended:
                running = self._running[name]
                raise ProcessFailed(
                    f"{name} ended with exit code {ended[name]}; the end of its log:\n{running.tail()}"
                )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        try:
            self._guardian.stdin.write(json.dumps(request) + "\n")
            self._guardian.stdin.flush()
        except BrokenPipeError:
            raise DemoError("the demo's guardian process is gone") from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._guardian is not None
        assert self._guardian.stdout is not None
        line = self._guardian.stdout.readline()
        if not line:
            raise DemoError("the demo's guardian process is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self, name: str) -> str:
        """Return the end of a process's log."""
        return self._running[name].tail()
