"""Shows what the demo is doing: on a terminal a spinner with the time so far, elsewhere one line a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """The steps of one start, timed. Everything goes to stderr: stdout is for data."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self.seconds: dict[str, float] = {}
        """How long each finished step took."""

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[Callable[[str], None]]:
        """Show `text` while the body runs, and then how long it took; it is kept under `name`.

        Yields a function that notes something within the step.
        """
        began = time.monotonic()
        if self._console.is_terminal:
            with Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            ) as progress:
                progress.add_task(text)
                yield lambda note: progress.console.print(f"   {note}, {time.monotonic() - began:.1f} s")
        else:
            self.say(f"{text} …")
            yield lambda note: self.say(f"   {note}, {time.monotonic() - began:.1f} s")
        self.seconds[name] = round(time.monotonic() - began, 2)
        self.say(f"✓ {text}: {self.seconds[name]:.1f} s")

    def say(self, line: str) -> None:
        """Print one line, if there still is a terminal to print it on."""
        with suppress(OSError):
            self._console.print(line, markup=False, soft_wrap=True)
