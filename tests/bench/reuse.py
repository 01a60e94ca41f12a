"""What reading turn 1's KV back from D saves: time to P's answer to a second turn, with and without.

Both are asked of the same pair by turns, each of a conversation of its own that D has answered at length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from tests.bench.paired import Ratio, quartiles
from tests.support.pair import Turn, running_pair
from tests.support.two_steps import decode_and_keep, next_turn, prefill

PAIRS = 12
ANSWERED = 1500
"""Tokens of D's first answer, which P has never computed."""


def measure() -> Iterator[Ratio]:
    """Yield the ratio of P's latency for the second turn: reading back to computing."""
    source = random.Random(1)
    times = []
    with running_pair("kvtop-reuse") as pair:

        def turn(tokens: int, max_tokens: int) -> Turn:
            return Turn("", max_tokens, tuple(source.randrange(1, 250) for _ in range(tokens)))

        def second_turn_s(*, reads: bool) -> float:
            first = turn(100, ANSWERED)
            answer, kept = decode_and_keep(pair.pair.decode, prefill(pair.pair.prefill, first))
            second = next_turn(first, answer, turn(30, 1))
            started = time.perf_counter()
            prefill(pair.pair.prefill, second, **(kept if reads else {}))
            return time.perf_counter() - started

        for number in range(-1, PAIRS):
            with_it, without = (second_turn_s(reads=reads) for reads in (True, False))
            if number >= 0:
                times.append((with_it, without))
    yield quartiles(f"P's second turn, {ANSWERED} tokens read back from D / computed by P", times)
