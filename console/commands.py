"""The command tree: `kvtop [HOST…]` opens the terminal UI, the other commands print once.

Nothing here imports textual or asyncssh before a command needs it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvtop import __version__
from kvtop.console.fleet.targets import Target, parse_targets
from kvtop.console.options import DEFAULT_HOSTS, connection_options, dial_options

CONSOLE = "console"
"""The command that plain `kvtop [HOST…]` stands for."""
LAZY_COMMANDS = {
    "demo": "kvtop.console.demo.command:demo",
    **{verb: f"kvtop.console.act:{verb}" for verb in ("mode", "drain", "undrain", "cancel", "evict")},
}
"""Commands whose modules are loaded when they are called or listed."""


class Kvtop(click.Group):
    """A group whose default command takes the host names, so that `kvtop HOST` works.

    A first argument that is a command's name is that command; `kvtop -- HOST` names a host all the same.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command's name in front of what is no command."""
        flags = {name for param in self.get_params(ctx) for name in param.opts}
        position = next((i for i, arg in enumerate(args) if arg not in flags), len(args))
        if position == len(args) or args[position] not in self.list_commands(ctx):
            args = [*args[:position], CONSOLE, *args[position:]]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *LAZY_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, loading its module where that was put off."""
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = LAZY_COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Kvtop, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="kvtop %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of a bug in kvtop.")
def kvtop(*, debug: bool) -> None:
    """Operations console for disaggregated LLM serving: live KV transfers, TTFT and ITL.

    `kvtop [HOST]...` opens the console on these hosts, reached over SSH: host, user@host:port, ranges such
    as p[01-08]. `local` (the default) is the agent on this machine, unix:/PATH the one behind a socket.
    A host with a command's name is written `kvtop -- HOST`.
    """
    del debug  # read from the arguments where a bug is reported


@kvtop.command(CONSOLE)
@connection_options
@click.option("--theme", default=None, help="Theme to start with (`t` takes the next one).")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
def console(hosts: tuple[str, ...], theme: str | None, interval_s: float, **connection: Any) -> int:
    """Open the console on HOST... (the default command)."""
    targets = _targets(hosts)
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("the console needs a terminal; `kvtop status` prints once")
    gc.disable()  # what is made before the first frame stays; the app turns it on again behind that frame
    from kvtop.console.terminal import run_terminal  # noqa: PLC0415 - textual is for this command only

    return run_terminal(targets, dial_options(**connection), theme=theme, interval_s=interval_s)


@kvtop.command()
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema_version 1).")
def status(hosts: tuple[str, ...], *, as_json: bool, **connection: Any) -> int:
    """Print instances with their state, load and latency, once."""
    return _print_once("status", hosts, connection, as_json=as_json)


@kvtop.command()
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema_version 1).")
def transfers(hosts: tuple[str, ...], *, as_json: bool, **connection: Any) -> int:
    """Print live and latest KV transfers, once."""
    return _print_once("transfers", hosts, connection, as_json=as_json)


@kvtop.command()
@click.argument("output", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="OUT.svg")
@connection_options
@click.option("--size", default="120x35", show_default=True, metavar="WxH", help="Terminal size in cells.")
@click.option("--theme", default=None, help="Theme to draw in.")
@click.option("--screen", type=click.Choice(["fleet", "transfers"]), default="fleet", show_default=True)
@click.option(
    "--after",
    "after_s",
    type=click.FloatRange(min=0.0),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to watch, once data is there.",
)
def screenshot(
    output: Path,
    hosts: tuple[str, ...],
    *,
    size: str,
    theme: str | None,
    screen: str,
    after_s: float,
    **connection: Any,
) -> int:
    """Draw the console on HOST... into an SVG file, without a terminal."""
    from kvtop.console.screenshot import take_screenshot  # noqa: PLC0415 - textual is for this command only

    return take_screenshot(
        output,
        _targets(hosts),
        dial_options(**connection),
        size=size,
        theme=theme,
        screen=screen,
        after_s=after_s,
    )


def _targets(hosts: tuple[str, ...]) -> tuple[Target, ...]:
    return parse_targets(hosts or DEFAULT_HOSTS)


def _print_once(what: str, hosts: tuple[str, ...], connection: dict[str, Any], *, as_json: bool) -> int:
    from kvtop.console import once  # noqa: PLC0415 - not needed for `--help`

    answers = asyncio.run(once.ask_all(_targets(hosts), dial_options(**connection)))
    sys.stdout.write(once.as_json(answers) if as_json else once.as_text(what, answers))
    return once.report_errors(answers)
