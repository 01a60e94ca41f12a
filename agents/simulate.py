"""Simulated engines: they speak the ingest protocol as kvtop's connector does, and say what they are.

For trying kvtop where no vLLM is installed, and for load in tests and benchmarks. Every duration, size and
failure that they report is drawn at random. They obey orders as kvtop's connector does.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from kvtop.agents.events import Direction, Side
from kvtop.agents.runtime import RuntimeFolderError, RuntimePaths
from kvtop.agents.simulated_engine import Orders, SimulatedEngine
from kvtop.agents.simulated_request import NS, Pair, Request

LOOK_S: Final = 0.05
"""How often a simulation looks for orders, at least."""


class Simulation:
    """Requests that arrive at random and are served by pairs of simulated engines."""

    def __init__(
        self,
        paths: RuntimePaths,
        *,
        pairs: int = 1,
        rate_per_s: float = 4.0,
        mode: Direction = "push",
        failure_rate: float = 0.02,
        seed: int | None = None,
    ) -> None:
        """Attach `pairs` pairs to the agent in `paths`.

        Args:
            paths: the agent's sockets.
            pairs: how many prefill and how many decode instances.
            rate_per_s: requests per second, over all pairs.
            mode: the direction of all transfers, until ordered otherwise.
            failure_rate: share of transfers that fail or expire, 0 to 1.
            seed: makes a run repeatable but for its timing.
        """
        self._rate_per_s = rate_per_s
        self._failure_rate = failure_rate
        self._random = random.Random(seed)
        self._orders: Orders = SimpleQueue()
        self._look_due_s = 0.0
        self._pairs = [
            Pair(
                SimulatedEngine(f"sim-prefill-{number}", "prefill", mode, paths, self._orders),
                SimulatedEngine(f"sim-decode-{number}", "decode", mode, paths, self._orders),
            )
            for number in range(pairs)
        ]
        self._engines = [engine for pair in self._pairs for engine in (pair.prefill, pair.decode)]
        self._requests: dict[str, Request] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def run(self, stop: threading.Event, duration_s: float | None = None) -> None:
        """Serve requests until `stop` is set or `duration_s` has passed, then detach in order."""
        now_ns = time.monotonic_ns()
        end_ns = None if duration_s is None else now_ns + int(duration_s * NS)
        self._at(now_ns, self._arrive)
        while not stop.is_set() and (end_ns is None or time.monotonic_ns() < end_ns):
            due_ns, _, action = self._due[0]
            wait_s = (due_ns - time.monotonic_ns()) / NS
            if wait_s > 0:
                stop.wait(min(wait_s, LOOK_S))
            else:
                heapq.heappop(self._due)
                action()
            self._look()
        for engine in self._engines:
            engine.reporter.close()

    def _look(self) -> None:
        """Obey what was ordered, and have each engine say what holds where that is due."""
        while not self._orders.empty():
            engine, order = self._orders.get()
            engine.obey(order, self._cancel)
        if time.monotonic() >= self._look_due_s:
            self._look_due_s = time.monotonic() + LOOK_S
            for engine in self._engines:
                engine.report_in_time()

    def _at(self, at_ns: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_ns, self._count, action))

    def _arrive(self) -> None:
        """Begin one request, and plan the next arrival."""
        now_ns = time.monotonic_ns()
        self._at(now_ns + int(self._random.expovariate(self._rate_per_s) * NS), self._arrive)
        pair = self._random.choice(self._pairs)
        request = Request(self._random, pair, self._failure_rate)
        self._requests |= dict.fromkeys(request.ids.values(), request)
        self._at(request.plan(now_ns, self._at), lambda: self._forget(request))

    def _forget(self, request: Request) -> None:
        for request_id in request.ids.values():
            del self._requests[request_id]

    def _cancel(self, side: Side, request_id: str) -> tuple[bool, str]:
        request = self._requests.get(request_id)
        if request is None or request.ids[side] != request_id:
            return False, "no transfer of that request is under way"
        return request.cancel(side)


def _number(kind: Callable[[str], float], least: float, most: float, wanted: str) -> Callable[[str], Any]:
    """Return an argparse type: a finite number from `least` to `most`, else an error that says `wanted`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _options() -> argparse.Namespace:
    positive = _number(float, 1e-3, 1e5, "a number from 0.001 to 100000")
    pairs = _number(int, 1, 1000, "a whole number from 1 to 1000")
    share = _number(float, 0, 1, "a share from 0 to 1")
    parser = argparse.ArgumentParser(prog="python -m kvtop.agents.simulate", description=__doc__)
    parser.add_argument("--pairs", type=pairs, default=1, help="prefill/decode pairs (default 1)")
    parser.add_argument("--rate", type=positive, default=4.0, help="requests per second (default 4)")
    parser.add_argument("--mode", choices=("push", "pull"), default="push")
    parser.add_argument(
        "--failure-rate", type=share, default=0.02, help="share that fails or expires (default 0.02)"
    )
    parser.add_argument("--duration", type=positive, help="seconds; without it, until interrupted")
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


def main() -> None:
    """Run a simulation against this user's agent until told to end."""
    options = _options()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        paths = RuntimePaths.default()
        paths.prepare()
    except RuntimeFolderError as error:
        sys.exit(f"Error: {error}")  # exit code 1
    Simulation(
        paths,
        pairs=options.pairs,
        rate_per_s=options.rate,
        mode=options.mode,
        failure_rate=options.failure_rate,
        seed=options.seed,
    ).run(stop, options.duration)


if __name__ == "__main__":
    main()
