"""`kvtop demo`: starts a deployment on this machine, opens the console on it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from kvtop.console.cli import ENDING_SIGNALS
from kvtop.console.demo import preflight
from kvtop.console.demo.ports import LAST_BASE, Ports, free_ports
from kvtop.console.demo.processes import Processes
from kvtop.console.demo.show import Show, Wanted
from kvtop.console.demo.steps import Steps

DEFAULT_REQUESTS = 20


@click.command()
@click.option(
    "--simulate", is_flag=True, help="Simulated engines instead of vLLM; every screen says SIMULATED."
)
@click.option(
    "--mode", type=click.Choice(["push", "pull"]), default="push", show_default=True, help="Way the KV moves."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0.01, max=1000),
    default=2.0,
    show_default=True,
    metavar="PER_SECOND",
    help="Requests offered per second.",
)
@click.option("--headless", is_flag=True, help="No console: send some requests and print the figures.")
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="With --headless: how many requests.  [default: 20]",
)
@click.option("--json", "as_json", is_flag=True, help="With --headless: print the figures as JSON.")
@click.option(
    "--port-base",
    type=click.IntRange(1024, LAST_BASE),
    metavar="PORT",
    help="First of the ports to listen on (loopback).  [default: free ones]",
)
@click.option("--keep", is_flag=True, help="Leave the folder with the logs, and say where it is.")
def demo(
    *,
    simulate: bool,
    mode: str,
    rate: float,
    headless: bool,
    requests: int | None,
    as_json: bool,
    port_base: int | None,
    keep: bool,
) -> int:
    """Run a live prefill/decode deployment on this machine and look at it.

    Starts two vLLM servers with kvtop's connector and a tiny model made on the spot, the vLLM router, load on
    it, and a node agent, and opens the console on it over SSH. Leaving the console ends all of it.
    """
    if not headless and (requests is not None or as_json):
        raise click.UsageError("--requests and --json go with --headless")
    if not headless and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the console needs a terminal; --headless prints the figures instead")
    wanted = Wanted(mode, rate, simulate, requests or DEFAULT_REQUESTS)
    with _interruptible():
        return _run(wanted, _check(wanted, port_base), keep=keep, headless=headless, as_json=as_json)


def _run(wanted: Wanted, ports: Ports, *, keep: bool, headless: bool, as_json: bool) -> int:
    """Start everything, show it, end everything; return the exit code."""
    steps = Steps()
    processes = Processes(keep=keep)
    try:
        show = Show(wanted, processes.open(), ports, steps)
        show.start()
        return show.figures(as_json=as_json) if headless else show.console()
    finally:
        _ignore_signals()
        steps.say("Ending every process …")
        processes.close()
        if keep:
            steps.say(f"kept: {processes.folder}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let the first signal to end raise KeyboardInterrupt in the body, and ignore further ones.

    A closed terminal and a polite kill thus take the same way out as Ctrl+C, and nobody's second Ctrl+C
    breaks that off.
    """

    def interrupt(_number: int, _frame: object) -> NoReturn:
        _ignore_signals()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _check(wanted: Wanted, port_base: int | None) -> Ports:
    """Return the ports to use, all of this machine's fitness checked."""
    preflight.check_platform()
    if not wanted.simulated:
        preflight.check_vllm()
        preflight.check_memory(servers=2)
    preflight.check_disk(Path(tempfile.gettempdir()))
    if port_base is None:
        return free_ports()
    ports = Ports(port_base)
    ports.check()
    return ports
