"""No `kv_transfer_params` that a client may send ends an engine: what cannot be obeyed is named."""

from __future__ import annotations

import contextlib
import time
import timeit
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.connector.params import (
    MAX_BLOCKS,
    BadParameter,
    are_block_ids,
    beyond,
    check,
    check_registration,
    shown,
)

DECODE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "1c1debf9-c6a8-46e3-8226-45f376acfe9c",
    "remote_request_id": "cmpl-___prefill_addr_127.0.0.1:26110___decode_addr_127.0.0.1:26111_7dd3-0-b7c81d4c",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 55,
    "remote_blocks_expiry_time": None,
    "remote_prefill_cached_tokens": 0,
    "transfer_mode": "push",
}
PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
REGISTRATION: dict[str, Any] = {
    "request_id": "cmpl-1",
    "decode_engine_id": "engine",
    "decode_host": "10.0.0.7",
    "decode_port": 5650,
    "decode_tp_size": 1,
    "local_block_ids": [[4, 5]],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "params",
    [
        DECODE,
        PREFILL,
        {**DECODE, "remote_block_ids": None, "transfer_mode": None},
        {**DECODE, "remote_block_ids": []},
        {**DECODE, "remote_host": "::1"},
        {**DECODE, "remote_host": "prefill-0.pods.svc.cluster.local"},
        {**DECODE, "a_router_knows_more": {"than": ["we", "do"]}, "_so_does": "this one"},
        {},
    ],
)
def test_what_routers_and_peers_send_passes_unchanged(params: dict[str, Any]) -> None:
    assert check(params, groups=1, engine_id="another") == {**params}


@pytest.mark.parametrize("field", ["dcp_size", "pp_size", "remote_registration_generation"])
def test_a_null_that_upstream_would_calculate_with_is_as_good_as_absent(field: str) -> None:
    """`{"pp_size": null}` multiplies None by the number of ranks, on the engine's thread."""
    assert check({**DECODE, field: None}, groups=1) == {k: v for k, v in DECODE.items() if k != field}


@pytest.mark.parametrize("value", [0, 1, "", "text", [], [["do_remote_prefill", True]], True, 1.5])
def test_parameters_that_are_no_map_are_refused(value: object) -> None:
    """`{"vllm_xargs": {"kv_transfer_params": 0}}` brings them past the API server."""
    with pytest.raises(BadParameter, match=r"^kv_transfer_params must be a map"):
        check(value, groups=1)


def test_an_engine_is_no_peer_of_its_own() -> None:
    with pytest.raises(BadParameter, match="remote_engine_id"):
        check(DECODE, groups=1, engine_id=DECODE["remote_engine_id"])


def test_a_map_of_any_size_is_refused_at_once() -> None:
    huge = {str(number): number for number in range(1_000_000)}
    started = time.perf_counter()
    for params in (huge, {**DECODE, "remote_host": huge}, {**DECODE, "remote_block_ids": [huge]}):
        with pytest.raises(BadParameter) as refused:
            check(params, groups=1)
        assert len(str(refused.value)) < 250
    assert time.perf_counter() - started < 0.1


def test_the_block_ids_of_a_long_prompt_are_checked_in_less_than_a_millisecond() -> None:
    params = {**DECODE, "remote_block_ids": [list(range(8192))]}  # 128k tokens in blocks of 16
    took = min(timeit.repeat(lambda: check(params, groups=1), number=1, repeat=20))
    assert took < 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_remote_decode", "yes"),
        ("do_remote_decode", True),
        ("remote_engine_id", None),
        ("remote_engine_id", 7),
        ("remote_engine_id", ""),
        ("remote_engine_id", "e" * 10_000),
        ("remote_request_id", None),
        ("remote_request_id", "a\x00b"),
        ("remote_request_id", "\ud800"),
        ("remote_host", None),
        ("remote_host", ""),
        ("remote_host", "a host"),
        ("remote_host", "h" * (1 << 20)),
        ("remote_host", ["10.0.0.1"]),
        ("remote_port", 0),
        ("remote_port", 70_000),
        ("remote_port", -1),
        ("remote_port", True),
        ("remote_port", "5600"),
        ("remote_port", 5600.0),
        ("remote_block_ids", "12"),
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [[1], [2]]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [[None]]),
        ("remote_block_ids", [[1 << 40]]),
        ("remote_block_ids", {"0": [1]}),
        ("tp_size", None),
        ("tp_size", 0),
        ("tp_size", "2"),
        ("pp_size", -3),
        ("dcp_size", 10**9),
        ("remote_num_tokens", "many"),
        ("remote_registration_generation", "1"),
        ("remote_host", "fe80::1%\n"),
        ("remote_block_ids", [[0] * (MAX_BLOCKS + 1)]),
        ("transfer_mode", "teleport"),
        ("transfer_mode", ["push"]),
        ("remote_blocks_expiry_time", float("nan")),
        ("_p_side_truncated", True),
        ("_remote_blocks_processed", True),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadParameter) as refused:
        check({**DECODE, field: value}, groups=1)
    assert refused.value.field.strip("'") in (field, "do_remote_prefill")
    assert len(str(refused.value)) < 250, "a message must not carry a megabyte"


@given(JSON | st.dictionaries(st.sampled_from([*DECODE, "other"]), JSON))
def test_no_value_at_all_raises_anything_else(params: object) -> None:
    with contextlib.suppress(BadParameter):
        checked = check(params, groups=1)
        assert not checked.get("do_remote_prefill") or _can_be_obeyed(checked)


@given(st.sampled_from(sorted(DECODE)), JSON)
def test_good_parameters_with_any_field_replaced_can_be_obeyed_or_are_refused(
    field: str, value: object
) -> None:
    with contextlib.suppress(BadParameter):
        checked = check({**DECODE, field: value}, groups=1)
        assert not checked.get("do_remote_prefill") or _can_be_obeyed(checked)


def _can_be_obeyed(params: dict[str, Any]) -> bool:
    """Do with parameters what upstream does, on threads that nothing may end."""
    block_ids: list[list[int]] = params.get("remote_block_ids") or []
    for group in block_ids:
        np.asarray(group, dtype=np.int32)
    f"HB:{','.join({params['remote_request_id']})}".encode()
    hash(params["remote_engine_id"])
    return bool(
        1 <= params["remote_port"] <= 65_535
        and are_block_ids(block_ids, 1)
        and params.get("pp_size", 1) * params["tp_size"] * params.get("dcp_size", 1) >= 1
        and params.get("remote_registration_generation", 0) >= 0
        and (params.get("remote_blocks_expiry_time") or 0) - 1.0 < 1e18
    )


@given(JSON)
def test_no_registration_at_all_raises_anything_else(data: object) -> None:
    try:
        checked = check_registration(data, groups=1)
    except BadParameter:
        return
    assert checked["request_id"]


@given(st.sampled_from(sorted(REGISTRATION)), JSON)
def test_a_registration_with_any_field_replaced_is_served_or_refused(field: str, value: object) -> None:
    with contextlib.suppress(BadParameter):
        checked = check_registration({**REGISTRATION, field: value}, groups=1)
        assert checked[field] == value


@pytest.mark.parametrize("block_ids", [None, 7, "12", [[1], [2]], [1, "2"], [1, [2]], [[-1]], [True], {}])
def test_a_registration_without_usable_blocks_is_refused(block_ids: object) -> None:
    with pytest.raises(BadParameter, match=r"^registration\.local_block_ids"):
        check_registration({**REGISTRATION, "local_block_ids": block_ids}, groups=1)


def test_a_registration_may_leave_out_the_list_around_its_only_group() -> None:
    flat = {**REGISTRATION, "local_block_ids": [4, 5]}
    assert check_registration(flat, groups=1) == flat
    assert beyond(flat["local_block_ids"], 5) == 5
    with pytest.raises(BadParameter):
        check_registration(flat, groups=2)


def test_a_registration_as_upstream_sends_it_passes() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(REGISTRATION))
    assert check_registration(sent, groups=1) == REGISTRATION


def test_a_value_of_any_depth_can_be_shown() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert len(shown(deep)) < 100


def test_a_block_that_the_peer_does_not_have_is_found() -> None:
    assert beyond([[0, 1, 2]], 3) is None
    assert beyond([[0, 3]], 3) == 3
    assert beyond([], 3) is None
