"""Whatever P does or fails to do, D's request ends in time and rightly, and no block is lost.

The pair is impatient: D waits `DEADLINE_S` for KV, P holds it for `LEASE_S`.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from kvtop.agents.model import Instance, Transfer
from kvtop.console.demo.load import Prompt, make_prompt
from kvtop.console.demo.servers import Server
from tests.chaos.storm import idle
from tests.support.pair import DEADLINE_S, LEASE_S, RunningPair, complete, complete_all
from tests.support.two_steps import Handed, decode, decode_and_leave, prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)]

MARGIN_S = 5.0
"""From a failure to the end of D's request, beyond the deadline."""


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompt:
    """A prompt of this test alone: a prefix that was seen before would be computed from the cache."""
    return make_prompt(random.Random(request.node.name).getrandbits(31), random.Random(request.node.name))


@pytest.fixture(autouse=True)
def nothing_is_left(pair: RunningPair) -> Iterator[None]:
    yield
    wait_until(lambda: idle(pair), "both engines' KV use and quarantine to be 0", timeout_s=30)


def test_a_lease_that_ended_first_is_told_at_once(
    pair: RunningPair, aggregated: Server, prompt: Prompt
) -> None:
    held = prefill(pair.pair.prefill, prompt)
    wait_until(lambda: _last(pair, "expired"), "P's lease to end", timeout_s=LEASE_S + 10)

    started = time.monotonic()
    answer = decode(pair.pair.decode, held)

    assert time.monotonic() - started < DEADLINE_S, "D waited for its own deadline, P told it nothing"
    assert answer == complete(aggregated.url, prompt)
    wait_until(lambda: _says(_last(pair, "failed"), "lease ended"), "the ledger to say why")


def test_blocks_whose_lease_has_ended_are_not_read(
    pair: RunningPair, aggregated: Server, prompt: Prompt
) -> None:
    """They may be others' by then: what D would read is not its prompt's KV."""
    held = prefill(pair.pair.prefill, prompt, transfer_mode="pull")
    assert held.params["transfer_mode"] == "pull"
    wait_until(lambda: _last(pair, "expired"), "P's lease to end", timeout_s=LEASE_S + 10)
    before = pair.nixl_counters()

    assert decode(pair.pair.decode, held) == complete(aggregated.url, prompt)

    assert pair.nixl_counters().since(before).transfers == 0
    wait_until(lambda: _says(_last(pair, "failed"), "lease had ended"), "the ledger to say why")


def test_a_prefill_that_hangs_costs_the_deadline_and_heals(
    pair: RunningPair, aggregated: Server, prompt: Prompt
) -> None:
    expected = complete(aggregated.url, prompt)
    held = prefill(pair.pair.prefill, prompt)

    with _stopped(pair.instances()["prefill"]):
        started = time.monotonic()
        answer = decode(pair.pair.decode, held)
        took_s = time.monotonic() - started
        wait_until(lambda: pair.instances()["decode"].quarantined_blocks, "D's blocks to be in quarantine")
        wait_until(
            lambda: any("hangs" in each.reason for each in pair.instances()["decode"].pairs),
            "D to say that its peer hangs",
            timeout_s=20,
        )

    assert answer == expected
    assert DEADLINE_S <= took_s < DEADLINE_S + MARGIN_S
    wait_until(
        lambda: not pair.instances()["decode"].quarantined_blocks, "the quarantine to end", timeout_s=20
    )
    again = make_prompt(77, random.Random(77))
    assert complete(pair.url, again) == complete(aggregated.url, again)


def test_a_request_that_p_never_got_ends_at_the_deadline(
    pair: RunningPair, aggregated: Server, prompt: Prompt
) -> None:
    """The router dispatches both at once, and P's half can be lost."""
    another = prefill(pair.pair.prefill, make_prompt(5, random.Random(5)))
    lost = Handed(prompt, another.params).but(remote_block_ids=None, remote_request_id="never-sent")

    started = time.monotonic()
    answer = decode(pair.pair.decode, lost)

    assert answer == complete(aggregated.url, prompt)
    assert DEADLINE_S <= time.monotonic() - started < DEADLINE_S + MARGIN_S


def test_a_client_that_leaves_d_frees_both_sides(pair: RunningPair, prompt: Prompt) -> None:
    held = prefill(pair.pair.prefill, prompt)
    with _stopped(pair.instances()["prefill"]):
        decode_and_leave(pair.pair.decode, held, after_s=DEADLINE_S / 2)
        wait_until(lambda: _last(pair, "cancelled", "quarantined"), "the ledger to show the end")


def _last(pair: RunningPair, *stages: str) -> Transfer | None:
    """The latest transfer, if it is in one of these stages."""
    rows = pair.snapshot().transfers
    return rows[-1] if rows and rows[-1].stage in stages else None


def _says(row: Transfer | None, what: str) -> bool:
    return row is not None and what in (row.error or "")


@contextmanager
def _stopped(instance: Instance) -> Iterator[None]:
    """Stop an instance's engine, as a node that hangs would."""
    engines = [psutil.Process(pid) for pid in instance.pids]
    for engine in engines:
        engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGCONT)


def test_all_is_as_before(pair: RunningPair, aggregated: Server) -> None:
    prompts = [make_prompt(9_000 + number, random.Random(number)) for number in range(8)]
    assert complete_all(pair.url, prompts, in_flight=4) == complete_all(aggregated.url, prompts)
