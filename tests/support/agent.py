"""A real agent process in a folder of its own, and ways to speak to it, rightly and wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from kvtop.agents.client import connect_unix
from kvtop.agents.events import EngineHello
from kvtop.agents.model import AGENT_MESSAGE, ClientHello, Snapshot
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import HEADER, WIRE_VERSION, Clock, encode_frame
from tests.support.waiting import wait_until


@contextlib.contextmanager
def runtime_folder() -> Iterator[RuntimePaths]:
    """A runtime folder with a short path (a Unix socket's is limited); no agent in it survives the test."""
    parent = Path(tempfile.mkdtemp(prefix="kvtop-"))
    paths = RuntimePaths.at(parent / "rt")
    try:
        yield paths
    finally:
        pid = agent_pid(paths)
        if pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                process.kill()
                process.wait(10)
        shutil.rmtree(parent)


def agent_pid(paths: RuntimePaths) -> int | None:
    """Return the pid of the agent that serves a folder, None where none does."""
    try:
        pid = int(paths.lock.read_text())
    except (OSError, ValueError):
        return None
    return pid if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" else None


@contextlib.contextmanager
def running_agent(paths: RuntimePaths, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run an agent, ready to be spoken to; its log is on `stderr`."""
    log = _log_of(paths)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtop.agents.cli", "run", *options],
            env={**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)},
            stderr=stderr,
            text=True,
        )
    try:
        wait_until(lambda: paths.operate.exists() or process.poll() is not None, "the agent to listen")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.wait(10)


def _log_of(paths: RuntimePaths) -> Path:
    return paths.folder.parent / "agent-under-test.log"


def agent_log(paths: RuntimePaths) -> str:
    """Return what the agent that `running_agent` runs has logged."""
    return _log_of(paths).read_text()


def hello(name: str = "prefill-0", **facts: Any) -> EngineHello:
    """An engine's hello."""
    given: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "software": "a test",
        "process": "api-server",
        "pid": os.getpid(),
        "engine_id": f"engine-of-{name}",
        "name": name,
        "role": "prefill",
        "mode": "push",
        "clock": Clock(time.monotonic_ns(), time.time_ns()),
    }
    return EngineHello(**{**given, **facts})


@contextlib.contextmanager
def reporting(paths: RuntimePaths, **options: Any) -> Iterator[Reporter]:
    """A started reporter that is attached."""
    reporter = Reporter(options.pop("hello", hello()), paths, **options)
    reporter.start()
    try:
        wait_until(lambda: reporter.connected, "the reporter to attach", timeout_s=20)
        yield reporter
    finally:
        reporter.close(5)


def snapshot(paths: RuntimePaths) -> Snapshot:
    """Ask an agent for all that it knows."""

    async def ask() -> Snapshot:
        async with await connect_unix(paths.view) as connection:
            return await connection.snapshot()

    return asyncio.run(ask())


def await_snapshot(paths: RuntimePaths, condition: Callable[[Snapshot], object], what: str) -> Snapshot:
    """Return the first snapshot for which `condition` holds."""
    seen: list[Snapshot] = []

    def holds() -> bool:
        try:
            seen[:] = [snapshot(paths)]
        except OSError:
            return False
        return bool(condition(seen[0]))

    wait_until(holds, what, timeout_s=20, poll_s=0.05)
    return seen[0]


def send_raw(path: Path, *parts: bytes, timeout_s: float = 10.0) -> bytes:
    """Send bytes to a socket, end the sending side, and return all that comes back."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                answer += received
        return answer


def messages_in(raw: bytes) -> list[Any]:
    """Return the messages in what an agent has sent, its welcome first."""
    messages = []
    while raw:
        (length,) = HEADER.unpack(raw[: HEADER.size])
        messages.append(AGENT_MESSAGE.decode(raw[HEADER.size : HEADER.size + length]))
        raw = raw[HEADER.size + length :]
    return messages


def frame(body: bytes) -> bytes:
    """A frame around any bytes."""
    return HEADER.pack(len(body)) + body


def client_hello(wire_version: int = WIRE_VERSION) -> bytes:
    """A console's first frame."""
    return encode_frame(ClientHello(wire_version, "a test"))
