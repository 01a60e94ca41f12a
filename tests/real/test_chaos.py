"""Switches, drains, cancels, evictions and clients that leave, all at once: every output is right in the end.

`make chaos` runs the same with 1,000 requests and a decode engine that is killed.
"""

from __future__ import annotations

import random

import pytest

from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import Server
from tests.chaos.storm import Storm, idle
from tests.support.pair import RunningPair, complete_all
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

REQUESTS = 100
SEED = 12


@pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)
def test_nothing_is_wrong_stuck_or_lost_in_a_storm(pair: RunningPair, aggregated: Server) -> None:
    source = random.Random(SEED)
    prompts = [make_prompt(40_000 + number, source) for number in range(REQUESTS)]
    expected = complete_all(aggregated.url, prompts, in_flight=4)

    summary = Storm(pair, SEED).run(prompts, expected)

    print(summary)
    assert (summary.wrong, summary.stuck) == ([], []), summary
    assert not summary.failed, summary
    assert summary.right + summary.left == REQUESTS
    for verb in ("mode", "drain", "undrain"):
        assert summary.actions[f"{verb} done"], f"no {verb} took effect: {summary}"
    for verb in ("cancel", "evict"):  # what they fall on may have ended, or be in use
        assert any(name.startswith(verb) for name in summary.actions), f"no {verb} was tried: {summary}"
    wait_until(lambda: idle(pair), "both engines' KV use to be what it was", timeout_s=60)
