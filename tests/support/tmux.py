"""A terminal for tests: tmux on a socket of its own."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import wait_until

SIZE = (120, 35)


class Terminal:
    """One terminal in which one command runs; its exit code is printed where it ran."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command, and only that, in this environment."""
        width, height = SIZE
        variables = [f"{name}={value}" for name, value in {**environment, "TERM": "tmux-256color"}.items()]
        shell = f"{shlex.join(['env', '-i', *variables, *command])}; echo exit code $?; exec cat"
        self._call("new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c", shell)

    def screen(self) -> str:
        """Return what the terminal shows."""
        return self._call("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Type keys, by tmux's names for them."""
        self._call("send-keys", *keys)

    def wait_for(self, *texts: str, timeout_s: float = 20.0) -> str:
        """Wait until the terminal shows all of these texts; return the screen. A failure shows it."""

        def shown() -> bool:
            screen = self.screen()
            return all(text in screen for text in texts)

        try:
            wait_until(
                shown, f"{' and '.join(map(repr, texts))} on the screen", timeout_s=timeout_s, poll_s=0.1
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen()}") from None
        return self.screen()

    def close(self) -> None:
        """Close the terminal, as a person closes a window: what runs in it gets SIGHUP."""
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)

    def _call(self, *argv: str) -> str:
        done = subprocess.run([*self._tmux, *argv], check=True, capture_output=True, text=True)
        return done.stdout


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """Provide a terminal whose socket lies in `folder`."""
    opened = Terminal(folder / "tmux.sock")
    try:
        yield opened
    finally:
        opened.close()
