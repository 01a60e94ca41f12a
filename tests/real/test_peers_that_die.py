"""An engine that dies, and one that comes back as another on the same address, cost no token and no block."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import Role, Server
from tests.support.pair import RunningPair, complete, complete_all, kill, start_again
from tests.support.two_steps import decode, decode_and_leave, prefill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm
ENDED_WITHIN_S = 10.0


@pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)
def test_a_decode_that_comes_back_as_another_engine_is_pushed_to_again(
    pair: RunningPair, aggregated: Server
) -> None:
    prompts = [make_prompt(8_000 + number, random.Random(number)) for number in range(6)]
    expected = complete_all(aggregated.url, prompts)
    assert complete_all(pair.url, prompts[:3]) == expected[:3]
    before = pair.instances()
    held = prefill(pair.pair.prefill, make_prompt(8_100, random.Random(8_100)))
    del held  # P holds these blocks for a D that never comes

    kill(pair, "decode")
    start_again(pair, "decode")

    assert complete_all(pair.url, prompts[3:]) == expected[3:]
    after = pair.instances()
    assert after["prefill"].pids == before["prefill"].pids, "P had to be restarted"
    assert after["decode"].engine_id != before["decode"].engine_id
    wait_until(
        lambda: _pair_state(pair, "prefill", before["decode"].engine_id) == "evicted",
        "P to forget the engine that is gone",
        timeout_s=20,
    )
    wait_until(lambda: not pair.instances()["prefill"].kv_usage, "P's KV use to be 0", timeout_s=20)


@pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)
def test_a_prefill_that_dies_leaves_no_block_behind(pair: RunningPair, aggregated: Server) -> None:
    """The client leaves, and P dies before it has written: what D had reserved comes back."""
    prompt = make_prompt(8_200, random.Random(8_200))
    expected = complete(aggregated.url, prompt)
    held = prefill(pair.pair.prefill, prompt)
    for engine in map(psutil.Process, pair.instances()["prefill"].pids):
        engine.send_signal(signal.SIGSTOP)
    decode_and_leave(pair.pair.decode, held, after_s=1.0)
    wait_until(lambda: pair.instances()["decode"].quarantined_blocks, "D's blocks to be in quarantine")

    kill(pair, "prefill")

    wait_until(
        lambda: not pair.instances()["decode"].quarantined_blocks, "the quarantine to end", timeout_s=20
    )
    wait_until(lambda: not pair.instances()["decode"].kv_usage, "D's KV use to be 0", timeout_s=20)
    gone = [each for each in pair.instances()["decode"].pairs if each.state == "failed"]
    assert any("gone" in each.reason for each in gone)
    start_again(pair, "prefill")
    assert complete(pair.url, prompt) == expected


@pytest.mark.parametrize("pair", ["kvtop-patient"], indirect=True)
def test_a_prefill_that_dies_costs_d_no_deadline(pair: RunningPair) -> None:
    """D's deadline there is a minute, and its policy is to fail what does not come."""
    complete(pair.url, make_prompt(8_299, random.Random(8_299)))  # they have met
    held = prefill(pair.pair.prefill, make_prompt(8_300, random.Random(8_300)))
    for engine in map(psutil.Process, pair.instances()["prefill"].pids):
        engine.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as client:
        request = client.submit(decode, pair.pair.decode, held)
        wait_until(lambda: pair.instances()["decode"].blockers, "D to wait for P")

        kill(pair, "prefill")

        began = time.monotonic()
        error = request.exception()
    assert error is not None, "it was answered, although P never wrote"
    assert time.monotonic() - began < ENDED_WITHIN_S
    gone = [each for each in pair.instances()["decode"].pairs if each.state == "failed"]
    assert any("gone" in each.reason for each in gone)
    wait_until(lambda: not pair.instances()["decode"].kv_usage, "D's KV use to be 0", timeout_s=20)


def _pair_state(pair: RunningPair, role: Role, peer_engine_id: str) -> str | None:
    states = {each.engine_id: each.state for each in pair.instances()[role].pairs}
    return states.get(peer_engine_id)
