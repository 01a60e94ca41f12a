"""How long a person waits for the console's first frame, against an empty Textual app.

Both run on a terminal of their own, and are measured from their start until the terminal has received the
text that the first frame ends with.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.paired import Ratio, ratio

KVTOP = Path(sys.executable).with_name("kvtop")
EMPTY_APP = """
from textual.app import App
from textual.widgets import Static


class Empty(App):
    def compose(self):
        yield Static("EMPTY APP")


Empty().run()
"""


def measure() -> Iterator[Ratio]:
    """Yield the ratio of the two waits."""
    yield ratio(
        "first frame of kvtop / of an empty Textual app",
        partial(_first_frame, [str(KVTOP), "unix:/nonexistent"], b"Transfers"),
        partial(_first_frame, [sys.executable, "-c", EMPTY_APP], b"EMPTY APP"),
    )


def _first_frame(command: list[str], text: bytes) -> None:
    """Run a command on a terminal of 120×35 until it has shown `text`, then end it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 35, 120, 0, 0))
    shown = b""
    try:
        while text not in shown:
            shown += os.read(terminal, 65536)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
