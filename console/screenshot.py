"""Draws the real terminal UI, attached to real targets, into an SVG file without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvtop.console.app import KvtopApp
from kvtop.console.cli import notice
from kvtop.console.fleet.conversation import DialOptions
from kvtop.console.fleet.errors import ConnectError, InputError
from kvtop.console.fleet.targets import Target
from kvtop.console.terminal import make_app

POLL_S = 0.1


def take_screenshot(
    output: Path,
    targets: Sequence[Target],
    options: DialOptions,
    *,
    size: str,
    theme: str | None,
    screen: str,
    after_s: float,
) -> int:
    """Attach, watch for `after_s` seconds from the first data on, write the SVG; return the exit code.

    Raises:
        InputError: the size or the theme is no such thing, or the file cannot be written.
    """
    app = make_app(targets, options, theme=theme, interval_s=0.25, screen=screen)
    svg = asyncio.run(_draw(app, _parse_size(size), options.timeout_s, after_s))
    if svg is None:
        for error in app.connect_errors:
            notice(str(error))
        return ConnectError.exit_code
    try:
        output.write_text(svg, "utf-8")
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}") from error
    notice(f"wrote {output}")
    return 0


async def _draw(app: KvtopApp, size: tuple[int, int], timeout_s: float, after_s: float) -> str | None:
    async with app.run_test(size=size) as pilot:
        try:
            async with asyncio.timeout(timeout_s + after_s):
                while not any(node.live for node in app.fleet.nodes):
                    if app.connect_errors:
                        return None
                    await pilot.pause(POLL_S)
        except TimeoutError:
            return None
        await pilot.pause(after_s)
        return app.export_screenshot(title="kvtop")


def _parse_size(size: str) -> tuple[int, int]:
    width, _, height = size.partition("x")
    if not (
        width.isdecimal() and height.isdecimal() and 20 <= int(width) <= 1000 and 5 <= int(height) <= 500
    ):
        raise InputError(f"--size {size!r}: write columns x lines, e.g. 120x35")
    return int(width), int(height)
