"""The comparison of outputs means something: what the model says depends on the KV cache."""

from __future__ import annotations

import random

import pytest

from kvtop.console.demo.load import Prompt
from kvtop.console.demo.servers import Server
from tests.support.pair import RunningPair, complete, complete_all

pytestmark = pytest.mark.vllm


def prompts(count: int, seed: int) -> list[Prompt]:
    """Long prompts, so that the first KV block is far from the end."""
    source = random.Random(seed)
    return [Prompt(f"{source.getrandbits(4000):x}"[:900], max_tokens=16) for _ in range(count)]


def test_another_first_token_gives_another_output(aggregated: Server) -> None:
    for prompt in prompts(5, seed=1):
        changed = Prompt("~" + prompt.text[1:], prompt.max_tokens)
        assert complete(aggregated.url, changed) != complete(aggregated.url, prompt)


@pytest.mark.parametrize("pair", ["corrupting"], indirect=True)
def test_a_damaged_block_on_the_decode_side_changes_the_output(pair: RunningPair, aggregated: Server) -> None:
    sound, damaged = prompts(5, seed=2), prompts(5, seed=3)

    assert complete_all(pair.url, sound) == complete_all(aggregated.url, sound)

    pair.damage_file.touch()
    for prompt in damaged:
        assert complete(pair.url, prompt) != complete(aggregated.url, prompt)
