"""A drain with the admission middleware: new requests are sent away, accepted ones go on to their end."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from kvtop.agents.act import Command
from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import MODEL_NAME, Server
from tests.chaos.storm import act
from tests.support.pair import RunningPair, complete
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-admission"], indirect=True)]

TOKENS = 200
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def test_a_draining_decode_finishes_what_it_took_and_takes_no_more(
    pair: RunningPair, aggregated: Server
) -> None:
    decode = pair.pair.decode
    body = {"model": MODEL_NAME, "prompt": "a long answer", "max_tokens": TOKENS, "ignore_eos": True}
    with httpx.stream("POST", f"{decode.url}/v1/completions", json={**body, **STREAM}) as accepted:
        chunks = accepted.iter_lines()
        assert next(chunks).startswith("data: ")

        told = _act(pair, "drain", decode.name)

        assert told.endswith("; new requests get 503")
        assert httpx.get(f"{decode.url}/kvtop/ready").status_code == 503
        refused = httpx.post(f"{decode.url}/v1/completions", json=body)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert httpx.get(f"{decode.url}/health").status_code == 200
        answered = [json.loads(line.removeprefix("data: ")) for line in chunks if line.startswith("data: {")]
    assert answered[-1]["usage"]["completion_tokens"] == TOKENS

    wait_until(lambda: pair.instances()["decode"].state == "drained", "the instance to be drained")
    _act(pair, "undrain", decode.name)
    assert httpx.get(f"{decode.url}/kvtop/ready").json() == {"ready": True}
    prompt = make_prompt(70_000, random.Random(70_000))
    assert complete(pair.url, prompt) == complete(aggregated.url, prompt)


def _act(pair: RunningPair, verb: str, name: str) -> str:
    outcome = asyncio.run(act(pair, Command(verb=verb, targets=[name], force=True)))
    assert outcome.state == "done", outcome.message
    return outcome.message
