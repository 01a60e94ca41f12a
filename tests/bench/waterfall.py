"""Where each millisecond of D's part of a push goes, from the request's arrival at D to its first token.

Each stage is the time between two stamps of the ledger's row, or the client's own at both ends; all are
CLOCK_MONOTONIC. The medians of the stages need not add up to the median of the whole.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvtop.agents.model import Transfer
from kvtop.console.demo.load import Prompt
from tests.bench.connector import prompts
from tests.support.pair import RunningPair, running_pair
from tests.support.two_steps import decode, prefill
from tests.support.waiting import wait_until

REQUESTS = 60
IN_FLIGHT = (1, 4)
STAGES = (
    ("D takes it and allocates", "asked", "allocated"),
    ("D registers", "allocated", "registered"),
    ("P's writer matches it", "registered", "matched"),
    ("P prepares", "matched", "posting"),
    ("P posts", "posting", "on_wire"),
    ("wire and notification, until D's scheduler", "on_wire", "received"),
    ("D computes the first token and answers", "received", "answered"),
)
"""What happens, and the stamps between which it does."""


def measure() -> Iterator[str]:
    """Yield the medians of all stages in milliseconds, for each number of requests in flight."""
    with running_pair("kvtop-push") as pair:
        source = prompts()
        for in_flight in IN_FLIGHT:
            with ThreadPoolExecutor(in_flight) as clients:
                asked = list(itertools.islice(source, REQUESTS))
                seen = list(clients.map(lambda prompt: _ask(pair, prompt), asked))
            stamps = [_stamps(pair, each) for each in seen]
            stages = [
                f"{what} {statistics.median(each[end] - each[start] for each in stamps) / 1e6:.1f}"
                for what, start, end in STAGES
            ]
            whole = statistics.median(each["answered"] - each["asked"] for each in stamps) / 1e6
            yield f"D's {whole:.1f} ms with {in_flight} in flight: " + ", ".join(stages)


@dataclass(frozen=True)
class Seen:
    """What its client saw of one request, in ns."""

    request_id: str
    asked: int
    answered: int


def _ask(pair: RunningPair, prompt: Prompt) -> Seen:
    handed = prefill(pair.pair.prefill, prompt)
    asked = time.monotonic_ns()
    decode(pair.pair.decode, handed)
    return Seen(handed.request_id, asked, time.monotonic_ns())


def _stamps(pair: RunningPair, seen: Seen) -> Mapping[str, int]:
    """Return when each thing happened to one request, in ns."""

    def rows() -> list[Transfer]:
        done = (row for row in pair.snapshot().transfers if row.stage == "done" and row.decode)
        return [row for row in done if row.decode and seen.request_id in (row.decode.request_id or "")]

    wait_until(rows, "the request's row to be done")
    times = {str(step): at_ns for step, at_ns in rows()[0].times_ns.items()}
    return {**times, "asked": seen.asked, "answered": seen.answered}
