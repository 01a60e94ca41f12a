"""kvtop's connector works with peers that run vLLM's own, on either side and in either direction.

A stock peer's engine ends on a notification that it cannot parse, so that it lives is part of what is shown.
"""

from __future__ import annotations

import random

import pytest

from kvtop.agents.model import Transfer
from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import Server
from tests.support.pair import RunningPair, complete_all
from tests.support.two_steps import Handed, decode_and_leave, prefill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

REQUESTS = 8
PAIRS = ["kvtop-push+stock-push", "stock-push+kvtop-push", "kvtop-pull+stock-pull", "stock-pull+kvtop-pull"]


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_outputs_are_right_with_a_stock_peer(pair: RunningPair, aggregated: Server) -> None:
    before = pair.nixl_counters()
    asked = [make_prompt(6_000 + number, random.Random(number)) for number in range(REQUESTS)]

    assert complete_all(pair.url, asked, in_flight=4) == complete_all(aggregated.url, asked)

    wait_until(
        lambda: pair.nixl_counters().since(before).transfers >= REQUESTS,
        f"vLLM to count {REQUESTS} transfers",
    )
    assert pair.nixl_counters().since(before).failed == 0
    wait_until(lambda: _done(pair) >= REQUESTS, "the side that kvtop sees to show all of them as done")


@pytest.mark.parametrize("pair", ["stock-push+kvtop-push"], indirect=True)
def test_a_stock_prefill_survives_a_decode_client_that_leaves(pair: RunningPair, aggregated: Server) -> None:
    """kvtop's D may not tell it what it tells another kvtop."""
    held = prefill(pair.pair.prefill, make_prompt(6_100, random.Random(6_100)))
    under_another_id = Handed(held.prompt, held.params)
    decode_and_leave(pair.pair.decode, under_another_id, after_s=1.0)

    asked = [make_prompt(6_200 + number, random.Random(number)) for number in range(4)]
    assert complete_all(pair.url, asked) == complete_all(aggregated.url, asked)


def _done(pair: RunningPair) -> int:
    rows: list[Transfer] = pair.snapshot().transfers
    return sum(row.stage == "done" for row in rows)
