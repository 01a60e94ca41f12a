"""Hundreds of malformed requests to both engines of a running pair: they live, and serve all others."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import MODEL_NAME, Server
from tests.chaos.storm import idle
from tests.support.pair import RunningPair, complete, complete_all
from tests.support.two_steps import prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)]

BATCH: Final = 25
BATCHES: Final = 22
"""550 malformed requests."""
ANSWERED_WITHIN_S: Final = 60.0

VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, -1, 1, 70_000, 65_536, 2**31, "", "0", "no host at all", "x" * 4096, [], [[]], {}]),
    st.sampled_from([[1, 2], [[-1]], [[0, 10**6]], [[0], [0]], [[2**40]], [["a"]], [[0.5]], {"a": [1]}]),
    st.text(max_size=20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.lists(st.integers(-5, 10**7), max_size=5), max_size=3),
)
FIELD = st.sampled_from(
    [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_block_size",
        "transfer_mode",
        "_p_side_truncated",
        "unheard_of",
    ]
)
CHANGES = st.lists(st.tuples(st.sampled_from(["replace", "remove"]), FIELD, VALUE), min_size=1, max_size=4)
SIDE = st.sampled_from(["prefill", "decode"])


@settings(
    max_examples=BATCHES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.lists(st.tuples(SIDE, CHANGES), min_size=BATCH, max_size=BATCH), st.integers(0, 2**31))
def _torment(pair: RunningPair, aggregated: Server, batch: list[tuple[str, Any]], seed: int) -> None:
    prompt = make_prompt(seed, random.Random(seed))
    good = prefill(pair.pair.prefill, make_prompt(seed + 1, random.Random(seed + 1))).params
    with ThreadPoolExecutor(BATCH) as pool:
        codes = list(pool.map(lambda each: _send(pair, good, *each), batch))
    assert all(200 <= code < 500 or code == 503 for code in codes), codes
    assert complete(pair.url, prompt) == complete(aggregated.url, prompt)


def test_no_request_ends_an_engine_or_harms_another(pair: RunningPair, aggregated: Server) -> None:
    before = {role: each.pids for role, each in pair.instances().items()}

    _torment(pair, aggregated)

    assert {role: each.pids for role, each in pair.instances().items()} == before
    refused = sum(each.transfers_failed.get("parameters", 0) for each in pair.instances().values())
    assert refused >= 100, f"only {refused} requests were seen to have wrong parameters"
    asked = [make_prompt(50_000 + number, random.Random(number)) for number in range(8)]
    assert complete_all(pair.url, asked, in_flight=4) == complete_all(aggregated.url, asked)
    wait_until(lambda: idle(pair), "all KV blocks to be free again", timeout_s=60)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_a_wrong_tp_size_does_not_end_the_prefills_handshakes(
    pair: RunningPair, aggregated: Server, tp_size: int
) -> None:
    """It makes D ask P for a rank that is not there, on which upstream's listener ends for all peers."""
    lost = prefill(pair.pair.prefill, make_prompt(60_000 + tp_size, random.Random(tp_size)))
    made_up = {"remote_engine_id": f"none-{tp_size}", "tp_size": tp_size}
    started = time.monotonic()
    assert _post(pair.pair.decode, {**lost.params, **made_up}) == 200
    assert time.monotonic() - started < ANSWERED_WITHIN_S

    pair.instances()  # the agent serves on
    asked = make_prompt(61_000 + tp_size, random.Random(tp_size))
    assert complete(pair.url, asked) == complete(aggregated.url, asked)


def _send(pair: RunningPair, good: dict[str, Any], side: str, changes: list[tuple[str, str, Any]]) -> int:
    params: dict[str, Any] = (
        dict(good) if side == "decode" else {"do_remote_decode": True, "do_remote_prefill": False}
    )
    params["remote_engine_id"] = good["remote_engine_id"] if side == "decode" else None
    for what, field, value in changes:
        if what == "remove":
            params.pop(field, None)
        else:
            params[field] = value
    return _post(pair.pair.prefill if side == "prefill" else pair.pair.decode, params)


def _post(server: Server, params: dict[str, Any]) -> int:
    body = {"model": MODEL_NAME, "prompt": "torment", "max_tokens": 1, "kv_transfer_params": params}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWERED_WITHIN_S).status_code
