"""An engine in a process of its own that reports to an agent, and ends as it is told to.

Run as `python -m tests.support.child_engine ENDING`: says `attached`, waits for a line on its standard input,
and then ends: `order`, `exit`, `segfault`; or is killed from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import hello
from tests.support.waiting import wait_until

ENGINE_ID = "engine-of-child"
LOG_LINE = "ERROR 12-06 10:00:00 [core.py:710] EngineCore failed: out of blocks"


def main() -> None:
    reporter = Reporter(
        hello("child", engine_id=ENGINE_ID, process="engine-core"), RuntimePaths.default(), start_agent=False
    )
    reporter.start()
    wait_until(lambda: reporter.connected, "the agent", timeout_s=30)
    ending = sys.argv[1]
    os.write(int(sys.argv[2]), b"attached\n")
    sys.stdin.readline()
    print(LOG_LINE, flush=True)
    print("INFO 12-06 10:00:00 [request_logger.py:9] Received request a: prompt: 'a secret'", flush=True)
    print("what a user printed", flush=True)
    if ending == "order":
        reporter.close(5)
    elif ending == "exit":
        os._exit(3)
    elif ending == "segfault":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)


@contextlib.contextmanager
def child_engine(ending: str, output: IO[str] | int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run such an engine, attached to the agent that this process's environment names."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.child_engine", ending, str(writing)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            pass_fds=(writing,),
            cwd=Path(__file__).parents[2],
        )
        os.close(writing)
        try:
            assert said.readline() == "attached\n"
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=10)


def go_on(process: subprocess.Popen[str]) -> None:
    """Let an engine come to its end."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


if __name__ == "__main__":
    main()
