"""Hundreds of malformed requests to both engines of a running pair: they live, and serve all others.

`KVTOP_SEED=N` draws the same requests again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from kvtop.agents.act import Command
from kvtop.connector.params import BadParameter, check
from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import MODEL_NAME, Role, Server
from tests.chaos.storm import act, idle
from tests.support.pair import RunningPair, complete, complete_all
from tests.support.two_steps import Handed, decode, prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-impatient"], indirect=True)]

MALFORMED: Final = 550
BATCH: Final = 50
FIELDS_AT_A_TIME: Final = 6
STRANGERS: Final = 60
"""More than have a thread to be waited for on."""
ANSWERED_WITHIN_S: Final = 60.0
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""vLLM's own."""
SEED: Final = int(os.environ.get("KVTOP_SEED") or random.SystemRandom().randrange(1 << 32))

FIELDS: Final = (
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
    "remote_blocks_expiry_time",
    "remote_prefill_cached_tokens",
    "remote_registration_generation",
    "transfer_mode",
    "_p_side_truncated",
    "unheard_of",
)
ODD: Final[Sequence[Any]] = (
    None,
    True,
    0,
    -1,
    1,
    70_000,
    2**31,
    2**64 - 1,
    1.5,
    "",
    "0",
    "no host at all",
    "x" * (1 << 20),
    [],
    [[]],
    [[-1]],
    [[0, 10**6]],
    [[2**40]],
    [["a"]],
    {"a": [1]},
)
VALUE = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from([[1, 2], [[0], [0]], [[0.5]], "push", "pull", "127.0.0.1"]),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.lists(st.integers(-5, 10**7), max_size=5), max_size=3),
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["replace", "remove"]), st.sampled_from(FIELDS), VALUE), min_size=1, max_size=4
)
SIDE: st.SearchStrategy[Role] = st.sampled_from(["prefill", "decode"])

Params = dict[str, Any]


@pytest.fixture
def survivors(pair: RunningPair, aggregated: Server) -> Iterator[RunningPair]:
    """The pair, whose engines must still be the same afterwards, idle, and right."""
    before = {role: each.pids for role, each in pair.instances().items()}
    print(f"KVTOP_SEED={SEED}")
    yield pair
    assert {role: each.pids for role, each in pair.instances().items()} == before
    asked = [make_prompt(50_000 + number, random.Random(number)) for number in range(8)]
    assert complete_all(pair.url, asked, in_flight=4) == complete_all(aggregated.url, asked)
    wait_until(lambda: idle(pair), "all KV blocks to be free again", timeout_s=60)


def test_no_request_ends_an_engine_or_harms_another(survivors: RunningPair, aggregated: Server) -> None:
    before = _refused(survivors)
    refused = 0
    drawn = _draw_changes()
    for first in range(0, len(drawn), BATCH):
        good = _handed(survivors, first)
        requests = [(side, _changed(side, good.params, each)) for side, each in drawn[first : first + BATCH]]
        refused += _send_beside_a_good_one(survivors, aggregated, requests, good)
    assert refused >= MALFORMED / 3, "too few of the requests were malformed"
    print(f"{len(drawn)} requests, {refused} of them with parameters that cannot be obeyed")
    _wait_until_counted(survivors, before + refused)


def _draw_changes() -> list[tuple[Role, Any]]:
    """Have hypothesis draw what is wrong with each request, and on which side."""
    drawn: list[tuple[Role, Any]] = []

    @seed(SEED)
    @settings(max_examples=MALFORMED, deadline=None, database=None, phases=[Phase.generate])
    @given(SIDE, CHANGES)
    def draw(side: Role, changes: Any) -> None:
        drawn.append((side, changes))

    draw()
    assert len(drawn) >= MALFORMED
    return drawn


@pytest.mark.parametrize(("side", "mode"), [("decode", "push"), ("decode", "pull"), ("prefill", "push")])
def test_each_field_may_be_wrong_in_every_way(
    survivors: RunningPair, aggregated: Server, side: Role, mode: str
) -> None:
    before = _refused(survivors)
    refused = 0
    for first in range(0, len(FIELDS), FIELDS_AT_A_TIME):
        good = _handed(survivors, first, mode)
        requests = [
            (side, _changed(side, good.params, [("replace", field, value)]))
            for field in FIELDS[first : first + FIELDS_AT_A_TIME]
            for value in ODD
        ]
        refused += _send_beside_a_good_one(survivors, aggregated, requests, good)
    _wait_until_counted(survivors, before + refused)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_any_field_may_be_null_or_absent(survivors: RunningPair, aggregated: Server, mode: str) -> None:
    asked = make_prompt(51_000, random.Random(51_000))
    expected = complete(aggregated.url, asked)
    for field in FIELDS:
        handed = prefill(survivors.pair.prefill, asked, transfer_mode=mode)
        assert decode(survivors.pair.decode, handed.but(**{field: None})) == expected, field
        handed = prefill(survivors.pair.prefill, asked, transfer_mode=mode)
        handed.params.pop(field, None)
        assert decode(survivors.pair.decode, handed) == expected, field


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_json_at_all_ends_an_engine(survivors: RunningPair, aggregated: Server, role: Role) -> None:
    """What vLLM's API server refuses is its own; what it passes on must not end the engine behind it."""
    server: Server = getattr(survivors.pair, role)
    asked = make_prompt(52_000, random.Random(52_000))
    expected = complete(aggregated.url, asked)
    for kv_transfer_params in (
        "7",
        '"text"',
        "[]",
        '{"remote_port": 1e999}',
        '{"remote_blocks_expiry_time": NaN, "do_remote_prefill": true}',
        f'{{"remote_port": {10**30}}}',
        f'{{"remote_port": {"9" * 5000}}}',
        '{"remote_host": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"remote_host": "\\u0000", "do_remote_prefill": true}',
        *(f'{{"x": {"[" * depth}{"]" * depth}}}' for depth in (100, 900, 5000)),
        *('{"x": ' + '{"y":' * depth + "1" + "}" * depth + "}" for depth in (100, 900, 5000)),
        json.dumps({str(number): number for number in range(20_000)}),
        json.dumps({"do_remote_prefill": True, "remote_block_ids": [list(range(200_000))]}),
    ):
        _post_raw(server, f'"kv_transfer_params": {kv_transfer_params}')
        assert complete(survivors.url, asked) == expected, kv_transfer_params[:80]
    for kv_transfer_params in ("0", "0.0", '""', "[]", "7", '"text"', '["text"]'):
        _post_raw(server, f'"vllm_xargs": {{"kv_transfer_params": {kv_transfer_params}}}')
        assert complete(survivors.url, asked) == expected, kv_transfer_params


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_wrong_tp_size_at_the_first_meeting_spoils_no_later_transfer(
    survivors: RunningPair, mode: str
) -> None:
    """Upstream's listener ends when asked for a rank that is not there; D keeps the size that it was told."""
    _part(survivors)
    lie = _handed(survivors, 2, mode).but(tp_size=2)
    assert _post(survivors.pair.decode, lie.params, lie.request_id) == 200

    before = survivors.nixl_counters()
    for number in range(3):
        decode(survivors.pair.decode, _handed(survivors, 53_000 + number, mode))
    assert survivors.nixl_counters().since(before).transfers == 3, "they were computed locally"


def test_an_engine_that_is_named_as_its_own_peer_is_none(survivors: RunningPair) -> None:
    itself = {
        "remote_engine_id": survivors.instances()["decode"].engine_id,
        "remote_port": survivors.pair.decode.side_channel,
    }
    before = _refused(survivors)
    for number, mode in enumerate(("push", "pull")):
        params = {**_handed(survivors, 3 + number, mode).params, **itself}
        assert _post(survivors.pair.decode, params) == 200
    _wait_until_counted(survivors, before + 2)


def test_peers_that_do_not_answer_do_not_hold_up_a_first_meeting(survivors: RunningPair) -> None:
    _part(survivors)
    good = _handed(survivors, 54_000)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=2 * STRANGERS) as silent,
        ThreadPoolExecutor(STRANGERS) as clients,
    ):
        stranger = good.but(remote_port=silent.getsockname()[1]).params
        held_up = [
            clients.submit(_post, survivors.pair.decode, {**stranger, "remote_engine_id": f"{uuid.uuid4()}"})
            for _ in range(STRANGERS)
        ]
        wait_until(lambda: survivors.instances()["decode"].blockers, "D to wait for what never comes")
        before = survivors.nixl_counters()
        started = time.monotonic()
        decode(survivors.pair.decode, good)
        took_s = time.monotonic() - started
        assert survivors.nixl_counters().since(before).transfers == 1, "it was computed locally"
        assert [each.result() for each in held_up] == [200] * len(held_up)
    print(f"a first meeting behind {len(held_up)} peers that do not answer took {took_s:.2f} s")
    assert took_s < HANDSHAKE_TIMEOUT_S


def _handed(pair: RunningPair, number: int, mode: str | None = None) -> Handed:
    """Return a prompt that P has computed, and what it tells D about it."""
    return prefill(pair.pair.prefill, make_prompt(number, random.Random(number)), transfer_mode=mode)


def _changed(side: Role, good: Params, changes: Sequence[tuple[str, str, Any]]) -> Params:
    """Return parameters for P or D that are as they should be but for some changes."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    params = dict(good) if side == "decode" else {**wanted, "transfer_mode": good["transfer_mode"]}
    for what, field, value in changes:
        if what == "remove":
            params.pop(field, None)
        else:
            params[field] = value
    return params


def _send_beside_a_good_one(
    pair: RunningPair, aggregated: Server, requests: Sequence[tuple[Role, Params]], good: Handed
) -> int:
    """Send malformed requests about what P holds, and good ones, all at once; return how many to refuse.

    Those that are not to be refused bear P's request id, so that P may find its blocks for one of them.
    """
    asked = good.prompt
    expected = complete(aggregated.url, asked)
    to_refuse = [_is_refused(params) for _, params in requests]
    with ThreadPoolExecutor(len(requests) + 2) as clients:
        answers = [
            clients.submit(_post, getattr(pair.pair, side), params, "" if refuse else good.request_id)
            for (side, params), refuse in zip(requests, to_refuse, strict=True)
        ]
        beside = [clients.submit(complete, pair.url, asked) for _ in range(2)]
        assert [each.result() for each in beside] == [expected] * 2
        codes = [each.result() for each in answers]
    assert set(codes) <= {200, 400, 422}
    assert complete(pair.url, asked) == expected
    return sum(code == 200 and refuse for code, refuse in zip(codes, to_refuse, strict=True))


def _is_refused(params: Params) -> bool:
    try:
        check(params, groups=1)
    except BadParameter:
        return True
    return False


def _refused(pair: RunningPair) -> int:
    """Return how many requests the ledgers say had parameters that could not be obeyed."""
    return sum(each.transfers_failed.get("parameters", 0) for each in pair.instances().values())


def _wait_until_counted(pair: RunningPair, count: int) -> None:
    wait_until(lambda: _refused(pair) >= count, f"{count} failures for their parameters to be counted")


def _part(pair: RunningPair) -> None:
    """Have D forget P, so that its next request begins with a handshake."""
    engines = pair.instances()
    command = Command(
        verb="evict",
        targets=[engines["decode"].engine_id],
        arguments={"peer": engines["prefill"].engine_id},
    )
    wait_until(lambda: asyncio.run(act(pair, command)).state == "done", "D to forget P", timeout_s=20)


def _post(server: Server, params: Params, request_id: str = "") -> int:
    return _post_raw(server, f'"kv_transfer_params": {json.dumps(params)}', request_id)


def _post_raw(server: Server, more: str, request_id: str = "") -> int:
    body = f'{{"model": "{MODEL_NAME}", "prompt": "torment", "max_tokens": 1, {more}}}'
    headers = {"Content-Type": "application/json", **({"X-Request-Id": request_id} if request_id else {})}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, content=body, headers=headers, timeout=ANSWERED_WITHIN_S).status_code
