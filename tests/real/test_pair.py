"""What the ledger says of a real pair is what happened in it."""

from __future__ import annotations

import pytest

from kvtop.agents.model import Transfer
from kvtop.console.demo.servers import Server
from tests.chaos.storm import idle
from tests.support.pair import RunningPair, complete_all, prompts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

REQUESTS = 20


@pytest.mark.parametrize("pair", ["kvtop-push", "kvtop-pull"], indirect=True)
def test_outputs_are_right_and_the_ledger_agrees_with_vllm(pair: RunningPair, aggregated: Server) -> None:
    wait_until(lambda: idle(pair), "what earlier tests left to end", timeout_s=60)
    mode = pair.instances()["prefill"].mode
    counted = pair.nixl_counters()
    known = {row.id for row in pair.snapshot().transfers}
    asked = prompts(REQUESTS, seed=20)

    outputs = complete_all(pair.url, asked, in_flight=4)

    def new_rows() -> list[Transfer]:
        return [row for row in pair.snapshot().transfers if row.id not in known]

    wait_until(lambda: sum(row.stage == "done" for row in new_rows()) >= REQUESTS, "20 transfers to be done")
    wait_until(
        lambda: pair.nixl_counters().since(counted).transfers >= REQUESTS, "vLLM to count 20 transfers"
    )

    assert outputs == complete_all(aggregated.url, asked)
    rows, by_vllm = new_rows(), pair.nixl_counters().since(counted)
    assert [(row.stage, row.direction) for row in rows] == [("done", mode)] * REQUESTS
    assert by_vllm.transfers == REQUESTS
    assert by_vllm.failed == 0
    assert sum(row.bytes or 0 for row in rows) == by_vllm.bytes
    assert sum(row.descriptors or 0 for row in rows) == by_vllm.descriptors
    for row in rows:
        assert row.prefill is not None
        assert row.decode is not None
        assert (row.prefill.name, row.decode.name) == ("prefill-0", "decode-0")


@pytest.mark.parametrize("pair", ["kvtop-push"], indirect=True)
def test_each_token_is_a_latency_sample(pair: RunningPair) -> None:
    def samples() -> tuple[int, int]:
        latency = pair.instances()["decode"].latency
        return (latency.ttft.count, latency.itl.count) if latency else (0, 0)

    wait_until(lambda: samples() == (0, 0), "earlier samples to leave the window", timeout_s=90, poll_s=0.5)
    asked = prompts(5, seed=21)

    complete_all(pair.url, asked)

    gaps = sum(prompt.max_tokens - 1 for prompt in asked)
    wait_until(lambda: samples() == (len(asked), gaps), f"{len(asked)} TTFT and {gaps} ITL samples")
