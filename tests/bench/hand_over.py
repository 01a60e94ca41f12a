"""How long D's request takes once P has the KV: kvtop's push to stock push and to stock pull, four in flight.

Each client has P compute a prompt, then has D answer it, as a router does that waits for P; only D's part is
timed. P computes the others' prompts meanwhile, which is where stock push loses most of its time.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvtop.console.demo.load import Prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.processes import Processes
from tests.bench.connector import PATIENT, Resting, prompts
from tests.bench.paired import Ratio, quartiles
from tests.support.pair import RunningPair, start_in
from tests.support.two_steps import decode, prefill

IN_FLIGHT = 4
REQUESTS = 12
"""Of each contender in each round."""
ROUNDS = 12
OUTPUT_TOKENS = 8
CONTENDERS = {"stock-push": "NixlPushConnector", "stock-pull": "NixlPullConnector"}


def measure() -> Iterator[Ratio]:
    """Yield the ratios of D's median latency, by turns, and of requests per second."""
    for theirs, what in CONTENDERS.items():
        with Processes() as processes:
            model = make_model(processes.folder / "model")
            pairs = [
                start_in(processes, name, model, prefix=f"{name}-", settings=PATIENT)
                for name in ("kvtop-push", theirs)
            ]
            with Resting(pairs[0]) as ours, Resting(pairs[1]) as other:
                clients = [Clients(pairs[0]), Clients(pairs[1])]
                rounds = list(_rounds((ours, clients[0]), (other, clients[1])))
        title = f"KvtopConnector push / {what}, {IN_FLIGHT} in flight"
        yield quartiles(f"D's median latency, {title}", [(a.latency_s, b.latency_s) for a, b in rounds])
        yield quartiles(f"time of {REQUESTS} requests, {title}", [(a.took_s, b.took_s) for a, b in rounds])
        yield quartiles(f"processor time of both servers, {title}", [(a.cpu_s, b.cpu_s) for a, b in rounds])


class Round:
    """What one contender took in one round."""

    def __init__(self, latency_s: float, took_s: float) -> None:
        self.latency_s, self.took_s = latency_s, took_s
        self.cpu_s = 0.0


class Clients:
    """The clients of one pair."""

    def __init__(self, pair: RunningPair) -> None:
        self._pair = pair.pair
        self._prompts = prompts()
        self._next = threading.Lock()

    def ask(self) -> Round:
        """Have the next prompts answered."""
        started = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            latencies = list(pool.map(lambda _: self._one(), range(REQUESTS)))
        return Round(statistics.median(latencies), time.perf_counter() - started)

    def _one(self) -> float:
        with self._next:
            (prompt,) = itertools.islice(self._prompts, 1)
        handed = prefill(self._pair.prefill, Prompt(prompt.text, OUTPUT_TOKENS))
        started = time.perf_counter()
        decode(self._pair.decode, handed)
        return time.perf_counter() - started


def _rounds(ours: tuple[Resting, Clients], theirs: tuple[Resting, Clients]) -> Iterator[tuple[Round, Round]]:
    """Yield rounds of both, swapping who goes first, after one of each that does not count."""
    for number in range(-1, ROUNDS):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {}
        for each in order:
            resting, clients = each
            resting.wake()
            before_s = resting.cpu_s()
            taken[id(each)] = clients.ask()
            taken[id(each)].cpu_s = resting.cpu_s() - before_s
            resting.rest()
        if number >= 0:
            yield taken[id(ours)], taken[id(theirs)]
