"""What a transfer's state change costs the engine's thread: the report, and what the scheduler side does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from kvtop.connector.control import Control
from kvtop.connector.inbound import Inbound
from kvtop.connector.routing import Router
from kvtop.connector.telemetry import Telemetry

TIMES = 2_000
REPEATS = 30


class Sink:
    """Takes events as the reporter's ring does (`tests/bench/put.py` measures the real one)."""

    def __init__(self) -> None:
        self._ring: list[Any] = []

    def put(self, event: object) -> None:
        self._ring.append(event)

    def close(self) -> None:
        self._ring.clear()


class Pool:
    """vLLM's block pool has reference counts; this one only takes the calls."""

    def touch(self, blocks: object) -> None:
        del blocks

    def free_blocks(self, blocks: object) -> None:
        del blocks


def measure() -> Iterator[str]:
    """Yield µs per call, medians."""
    telemetry = Telemetry(Sink())  # type: ignore[arg-type]
    inbound = Inbound(deadline_s=60.0, ranks=1)
    inbound.block_pool = Pool()
    control = Control(Router("push"), inbound, telemetry, lambda: None, ranks=1)
    blocks = [SimpleNamespace() for _ in range(64)]
    yield _line(
        "a report of one step", lambda: telemetry.step("decode", "cmpl-1-0-abcd", "allocated", "push")
    )

    def wait_and_arrive() -> None:
        inbound.expect("r", "push", blocks)
        inbound.arrived("r")

    yield _line("D begins to wait for 64 blocks, and they arrive", wait_and_arrive)
    yield _line("an engine step in which nothing is ordered and nothing changes", control.next_tasks)
    yield _line("looking whether the agent must be told anything", control.report)


def _line(what: str, call: Callable[[], object]) -> str:
    return f"{what}: median {_microseconds(call):.2f} µs ({REPEATS} x {TIMES} times)"


def _microseconds(call: Callable[[], object]) -> float:
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(TIMES):
            call()
        durations.append((time.perf_counter() - started) / TIMES * 1e6)
    return statistics.median(durations)
