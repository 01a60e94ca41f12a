"""A write that is on the wire cannot be stopped: whoever ends the request, its blocks wait until it is over.

The pair lives in a network namespace whose loopback is slow, over TCP, so that a write takes seconds.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from kvtop.console.demo.load import Prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.servers import Server
from tests.chaos.storm import idle
from tests.support.namespace import ProcessesInside, inside, slow_namespace
from tests.support.pair import DEADLINE_S, Completion, RunningPair, complete, complete_all, start_in
from tests.support.two_steps import Handed, decode, decode_and_leave, prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", [None], indirect=True)]

RATE = "100mbit"
PROMPT_BYTES = 3600
"""One token a byte: 29 blocks of 128 tokens and 1 MiB, a write of more than two seconds."""


@dataclass(frozen=True)
class SlowPair:
    """A pair in a namespace; what is asked of it is asked from there."""

    namespace: str
    running: RunningPair

    def prefill(self, prompt: Prompt) -> Handed:
        return inside(self.namespace, lambda: prefill(self.running.pair.prefill, prompt))

    def decode(self, handed: Handed) -> Completion:
        return inside(self.namespace, lambda: decode(self.running.pair.decode, handed))

    def leave(self, handed: Handed, after_s: float) -> None:
        inside(self.namespace, lambda: decode_and_leave(self.running.pair.decode, handed, after_s=after_s))

    def compute_on_decode(self, prompts: list[Prompt]) -> list[Completion]:
        """Have D answer prompts without any transfer, all at once."""
        url = self.running.pair.decode.url
        return inside(self.namespace, lambda: complete_all(url, prompts, in_flight=len(prompts)))

    def writes(self) -> int:
        return self.running.instances()["prefill"].blockers.get("writes", 0)

    def quarantined(self) -> int:
        return self.running.instances()["decode"].quarantined_blocks or 0


@pytest.fixture(scope="module")
def slow() -> Iterator[SlowPair]:
    with slow_namespace(RATE) as namespace, ProcessesInside(namespace) as processes:
        model = make_model(processes.folder / "model")
        settings = {"UCX_TLS": "tcp,self"}
        running = inside(
            namespace,
            lambda: start_in(processes, "kvtop-impatient", model, prefix="", settings=settings),
        )
        yield SlowPair(namespace, running)


@pytest.fixture(autouse=True)
def nothing_is_left(slow: SlowPair) -> Iterator[None]:
    yield
    wait_until(lambda: idle(slow.running), "both engines' KV use to be 0", timeout_s=60)


def long_prompt(seed: int, tokens: int = 8) -> Prompt:
    source = random.Random(seed)
    return Prompt("".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT_BYTES)), tokens)


def test_blocks_of_an_abandoned_write_are_not_given_to_others(
    pair: None, slow: SlowPair, aggregated: Server
) -> None:
    """D's client leaves under the write; others need more blocks than are left beside it."""
    warm = long_prompt(1)
    assert slow.decode(slow.prefill(warm)) == complete(aggregated.url, warm)
    others = [long_prompt(10), long_prompt(11)]
    expected = complete_all(aggregated.url, others)
    held = slow.prefill(long_prompt(2))

    with ThreadPoolExecutor(2) as background:
        leaving = background.submit(slow.leave, held, 1.0)
        wait_until(slow.writes, "P's write to be on the wire")
        leaving.result()
        wait_until(slow.quarantined, "D's blocks to be in quarantine")
        answers = background.submit(slow.compute_on_decode, others)
        assert slow.writes(), "the write was to be still on the wire"
        wait_until(lambda: not slow.quarantined(), "the quarantine to end with the write", timeout_s=30)
        assert answers.result() == expected

    (row,) = [each for each in slow.running.snapshot().transfers if each.decode and _is(each.decode, held)]
    assert row.stage in ("cancelled", "failed")
    assert "settled" in row.times_ns


def test_a_prefill_that_hangs_under_its_write_costs_the_deadline_and_heals(
    pair: None, slow: SlowPair, aggregated: Server
) -> None:
    prompt = long_prompt(3)
    expected = complete(aggregated.url, prompt)
    held = slow.prefill(prompt)
    engine = max(
        map(psutil.Process, slow.running.instances()["prefill"].pids), key=lambda each: each.memory_info().rss
    )

    with ThreadPoolExecutor(1) as background:
        started = time.monotonic()
        asked = background.submit(slow.decode, held)
        wait_until(slow.writes, "P's write to be on the wire")
        engine.send_signal(signal.SIGSTOP)
        try:
            assert asked.result() == expected
            took_s = time.monotonic() - started
            assert slow.quarantined(), "the write may still come"
        finally:
            engine.send_signal(signal.SIGCONT)
    assert took_s < DEADLINE_S + 5.0
    wait_until(lambda: not slow.quarantined(), "the pair to heal", timeout_s=30)
    again = long_prompt(4)
    assert slow.decode(slow.prefill(again)) == complete(aggregated.url, again)


def _is(endpoint: object, handed: Handed) -> bool:
    return handed.request_id in (getattr(endpoint, "request_id", None) or "")
