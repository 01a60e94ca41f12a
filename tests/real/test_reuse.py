"""Turn 2's prefill reads what D has computed in turn 1, and hands over in either direction."""

from __future__ import annotations

import random

import pytest

from kvtop.agents.model import Transfer
from kvtop.console.demo.servers import Server
from tests.chaos.storm import idle
from tests.support.pair import REUSE_S, RunningPair, Turn, complete
from tests.support.two_steps import decode, decode_and_keep, next_turn, prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-reuse"], indirect=True)]

BLOCK = 128
"""Tokens of a KV block of vLLM's CPU build."""


def turn(tokens: int, max_tokens: int, seed: int) -> Turn:
    source = random.Random(seed)
    return Turn("", max_tokens, tuple(source.randrange(1, 250) for _ in range(tokens)))


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("known", [2 * BLOCK, 3 * BLOCK - 20], ids=["full-blocks", "a-block-in-part"])
def test_the_second_turn_reads_the_first_ones_kv_back_from_d(
    pair: RunningPair, aggregated: Server, mode: str, known: int
) -> None:
    before = {row.id for row in pair.snapshot().transfers}
    seed = known + (mode == "push")
    first = turn(150, known + 1 - 150, seed)  # the last token that D answers is in no block yet
    answer, kept = decode_and_keep(pair.pair.decode, prefill(pair.pair.prefill, first, transfer_mode=mode))
    assert kept["remote_num_tokens"] == known
    second = next_turn(first, answer, turn(30, 24, seed + 1))

    handed = prefill(pair.pair.prefill, second, **{**kept, "transfer_mode": mode})
    output = decode(pair.pair.decode, handed)

    assert answer == complete(aggregated.url, first)
    assert output == complete(aggregated.url, second)
    over, back = ("prefill-0", "decode-0", mode), ("decode-0", "prefill-0", "pull")
    assert transfers_since(pair, before, 3) == [over, back, over]


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_num_tokens": 10_000},
        {"remote_host": None},
        {"remote_block_ids": [[1]]},
        {"remote_port": None},
    ],
    ids=lambda each: next(iter(each)),
)
def test_what_cannot_be_read_back_is_computed(
    pair: RunningPair, aggregated: Server, wrong: dict[str, object]
) -> None:
    first = turn(150, 150, len(str(wrong)))
    answer, kept = decode_and_keep(pair.pair.decode, prefill(pair.pair.prefill, first))
    second = next_turn(first, answer, turn(30, 24, 7))

    handed = prefill(pair.pair.prefill, second, **{**kept, **wrong})

    assert decode(pair.pair.decode, handed) == complete(aggregated.url, second)


def test_what_no_turn_reads_is_free_again_in_the_end(pair: RunningPair) -> None:
    wait_until(lambda: idle(pair), "D to free what it kept", timeout_s=REUSE_S + 10)


def transfers_since(pair: RunningPair, before: set[int], count: int) -> list[tuple[str, str, str]]:
    """Return from where to where, and how, the transfers since then went that have moved KV."""

    def moved() -> list[Transfer]:
        return [row for row in pair.snapshot().transfers if row.id not in before and row.bytes]

    wait_until(lambda: [row.stage for row in moved()] == ["done"] * count, f"{count} transfers to be done")
    return [
        (row.prefill.name, row.decode.name, row.direction)
        for row in moved()
        if row.prefill and row.decode and row.direction
    ]
