"""A cancelled transfer ends D's request at once, as `kv_load_failure_policy` says, and frees both sides.

P is stopped meanwhile, so that nothing but the cancel can end the wait, and P cannot answer the agent.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from kvtop.agents.act import Command
from kvtop.agents.model import LIVE_STAGES, Transfer
from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import Server
from tests.chaos.storm import act, idle
from tests.support.pair import Completion, RunningPair, complete
from tests.support.two_steps import Handed, decode, prefill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

AT_ONCE_S = 2.0


@pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)
def test_with_recompute_the_answer_is_right_all_the_same(pair: RunningPair, aggregated: Server) -> None:
    prompt = make_prompt(90_000, random.Random(90_000))
    expected = complete(aggregated.url, prompt)
    complete(pair.url, make_prompt(89_000, random.Random(89_000)))  # both have met
    held = prefill(pair.pair.prefill, prompt)

    with _waiting_for_p(pair, held) as asked, _cancelled(pair, held):
        assert asked.result(timeout=AT_ONCE_S) == expected
        wait_until(lambda: pair.instances()["decode"].quarantined_blocks, "D's blocks to be in quarantine")

    wait_until(lambda: idle(pair), "both sides' blocks to be free", timeout_s=30)
    assert (_row(pair, held) or _missing()).error_class == "cancel"


@pytest.mark.parametrize("pair", ["kvtop-failing"], indirect=True)
def test_with_fail_the_client_gets_an_error_at_once(pair: RunningPair, aggregated: Server) -> None:
    complete(pair.url, make_prompt(89_001, random.Random(89_001)))  # both have met
    held = prefill(pair.pair.prefill, make_prompt(90_001, random.Random(90_001)))

    with (
        _waiting_for_p(pair, held) as asked,
        _cancelled(pair, held),
        pytest.raises(AssertionError, match="error"),
    ):
        asked.result(timeout=AT_ONCE_S)

    wait_until(lambda: idle(pair), "both sides' blocks to be free", timeout_s=30)
    again = make_prompt(90_002, random.Random(90_002))
    assert complete(pair.url, again) == complete(aggregated.url, again)


@contextmanager
def _waiting_for_p(pair: RunningPair, held: Handed) -> Iterator[Future[Completion]]:
    """Have D wait for a P that it has met and that is stopped, until the end of the block."""
    engines = [psutil.Process(pid) for pid in pair.instances()["prefill"].pids]
    for engine in engines:
        engine.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as background:
            asked = background.submit(decode, pair.pair.decode, held)
            wait_until(lambda: "registered" in (_row(pair, held) or _missing()).times_ns, "D to wait for P")
            yield asked
            for engine in engines:
                engine.send_signal(signal.SIGCONT)
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGCONT)


@contextmanager
def _cancelled(pair: RunningPair, held: Handed) -> Iterator[None]:
    """Order the cancel, and look at its outcome when the block has ended: P, stopped, cannot answer."""
    row = _row(pair, held) or _missing()
    assert row.stage in LIVE_STAGES
    with ThreadPoolExecutor(1) as background:
        outcome = background.submit(asyncio.run, act(pair, Command(verb="cancel", targets=[str(row.id)])))
        yield
        assert "prefill-0" in outcome.result().message, outcome.result()


def _row(pair: RunningPair, held: Handed) -> Transfer | None:
    for row in reversed(pair.snapshot().transfers):
        if row.decode and held.request_id in (row.decode.request_id or ""):
            return row
    return None


def _missing() -> Transfer:
    return Transfer(id=0, stage="queued", stage_since_ns=0, first_seen_ns=0)
