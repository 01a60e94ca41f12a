"""Tensor parallelism that differs between P and D: every rank of both takes part, or the request ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtop.agents.model import Transfer
from kvtop.console.demo.servers import Server
from tests.chaos.storm import idle
from tests.support.pair import RunningPair, complete_all, prompts
from tests.support.two_steps import decode, prefill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

P_HAS_TWO = "kvtop-two-ranks+kvtop-one-rank"
D_HAS_TWO = "kvtop-one-rank+kvtop-two-ranks"
IN_TWO_STEPS = 4
AT_ONCE = 12
ENDED_WITHIN_S = 5.0


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("pair", [P_HAS_TWO, D_HAS_TWO], indirect=True)
def test_outputs_are_right_and_each_rank_is_counted(pair: RunningPair, aggregated: Server, mode: str) -> None:
    known = {row.id for row in pair.snapshot().transfers}
    asked = prompts(IN_TWO_STEPS, seed=70 if mode == "push" else 71)

    handed = [prefill(pair.pair.prefill, prompt, transfer_mode=mode) for prompt in asked]
    outputs = [decode(pair.pair.decode, each) for each in handed]
    initiator = pair.instances()["prefill" if mode == "push" else "decode"]

    assert outputs == complete_all(aggregated.url, asked)
    rows = settled_rows(pair, known, IN_TWO_STEPS)
    assert [(row.stage, row.direction) for row in rows] == [("done", mode)] * IN_TWO_STEPS
    assert [(row.ranks_done, row.ranks_expected) for row in rows] == [(initiator.tp_size,) * 2] * IN_TWO_STEPS
    wait_until(lambda: idle(pair), "all KV blocks to be free again", timeout_s=30)


@pytest.mark.parametrize("pair", [P_HAS_TWO, D_HAS_TWO], indirect=True)
def test_a_router_that_dispatches_to_both_at_once_is_served(pair: RunningPair, aggregated: Server) -> None:
    asked = prompts(AT_ONCE, seed=72)

    assert complete_all(pair.url, asked, in_flight=3) == complete_all(aggregated.url, asked)
    wait_until(lambda: idle(pair), "all KV blocks to be free again", timeout_s=30)


@pytest.mark.parametrize(("pair", "ranks"), [(P_HAS_TWO, (1, 2)), (D_HAS_TWO, (0, 1))], indirect=["pair"])
def test_a_write_that_cannot_be_posted_on_or_to_one_rank_ends_the_request_at_once(
    pair: RunningPair, aggregated: Server, ranks: tuple[int, int]
) -> None:
    """Scenario 2, and its mirror image."""
    known = {row.id for row in pair.snapshot().transfers}
    (asked,) = prompts(1, seed=73)
    handed = prefill(pair.pair.prefill, asked)

    with one_rank_failing(pair):
        began = time.monotonic()
        output = decode(pair.pair.decode, handed)
        took_s = time.monotonic() - began

    assert took_s < ENDED_WITHIN_S
    assert [output] == complete_all(aggregated.url, [asked])
    (row,) = settled_rows(pair, known, 1)
    assert (row.stage, row.error_class) == ("failed", "transport"), row
    assert (row.ranks_done, row.ranks_expected) == ranks
    assert "made to fail" in (row.error or "")
    wait_until(lambda: idle(pair), "no block of either side to be left", timeout_s=30)
    assert decode(pair.pair.decode, prefill(pair.pair.prefill, asked)) == output


@contextmanager
def one_rank_failing(pair: RunningPair) -> Iterator[None]:
    pair.damage_file.touch()
    try:
        yield
    finally:
        pair.damage_file.unlink()


def settled_rows(pair: RunningPair, known: set[int], count: int) -> list[Transfer]:
    """Return the rows of this test once all of them have ended."""

    def rows() -> list[Transfer]:
        return [row for row in pair.snapshot().transfers if row.id not in known]

    wait_until(
        lambda: len(rows()) >= count and all(row.stage in ("done", "failed") for row in rows()),
        "the transfers to end",
        timeout_s=30,
    )
    return rows()
