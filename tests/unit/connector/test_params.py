"""No `kv_transfer_params` that a client may send ends an engine: what cannot be obeyed is named."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.connector.params import BadParameter, are_block_ids, beyond, check, check_registration, shown

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
def test_what_routers_and_peers_send_passes(params: dict[str, Any]) -> None:
    check(params, groups=1)


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


@given(st.dictionaries(st.sampled_from([*DECODE, "other"]), JSON))
def test_no_value_at_all_raises_anything_else(params: dict[str, Any]) -> None:
    with contextlib.suppress(BadParameter):
        check(params, groups=1)
        assert not params.get("do_remote_prefill") or _can_be_obeyed(params)


def _can_be_obeyed(params: dict[str, Any]) -> bool:
    return 1 <= params["remote_port"] <= 65_535 and are_block_ids(params.get("remote_block_ids") or [], 1)


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
