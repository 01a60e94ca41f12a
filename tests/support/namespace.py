"""A network namespace whose loopback is slow: a transfer is on the wire for as long as a test needs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from kvtop.console.demo.processes import Processes, Running

CLONE_NEWNET = 0x40000000
"""From linux/sched.h."""
_T = TypeVar("_T")


@contextmanager
def slow_namespace(rate: str) -> Iterator[str]:
    """Make a network namespace whose loopback carries `rate` (as tc(8) writes it); remove it in the end."""
    name = f"kvtop-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        shape = ("tbf", "rate", rate, "burst", "256kb", "limit", "64mb")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *shape)
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"this machine cannot make a slow network namespace: {error}")
    try:
        yield name
    finally:
        _run("ip", "netns", "del", name)


def inside(namespace: str, call: Callable[[], _T]) -> _T:
    """Return what `call()` returns in a thread whose connections are made in the namespace."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _enter(namespace)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(namespace: str) -> None:
    """Move the calling thread, and the threads that it starts, into a network namespace."""
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


class ProcessesInside(Processes):
    """Processes that run in a network namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        outlives: bool = False,
    ) -> Running:
        within = ["ip", "netns", "exec", self._namespace, *argv]
        return super().start(name, within, env, outlives=outlives)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
