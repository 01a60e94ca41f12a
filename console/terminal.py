"""Runs the terminal UI on a fleet and turns how it ended into an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtop.console.app import KvtopApp
from kvtop.console.cli import ENDING_SIGNALS, INTERRUPTED_EXIT_CODE, notice
from kvtop.console.fleet.conversation import DialOptions, late_dialler
from kvtop.console.fleet.fleet import Fleet
from kvtop.console.fleet.targets import Target
from kvtop.console.theming import DEFAULT_THEME


def make_app(
    targets: Sequence[Target],
    options: DialOptions,
    *,
    theme: str | None,
    interval_s: float = 1.0,
    screen: str = "fleet",
) -> KvtopApp:
    """Return the app on a fleet that connects once the first frame is drawn.

    Raises:
        InputError: there is no theme of that name.
    """
    feed = Fleet(targets, late_dialler(options), interval_s=interval_s)
    return KvtopApp(feed, theme=theme or DEFAULT_THEME, start_mode=screen)


def run_terminal(
    targets: Sequence[Target], options: DialOptions, *, theme: str | None = None, interval_s: float = 1.0
) -> int:
    """Run the terminal UI until the operator leaves or the terminal goes; return the exit code.

    Raises:
        Exception: whatever bug ended the app.
    """
    app = make_app(targets, options, theme=theme, interval_s=interval_s)
    asyncio.run(_run(app))
    if app.failure is not None:
        raise app.failure
    for error in app.connect_errors:
        notice(str(error))
    return app.return_code or 0


async def _run(app: KvtopApp) -> None:
    """Run the app so that a signal to end leaves the terminal as it was found."""
    loop = asyncio.get_running_loop()
    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, app.exit, None, INTERRUPTED_EXIT_CODE)
    await app.run_async()
