"""Which half a request takes (connector.md, *Which direction a request takes*)."""

from __future__ import annotations

from typing import Any

import pytest

from kvtop.agents.events import Direction
from kvtop.connector.routing import Router, direction_of

PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("wanted", ["push", "pull"])
@pytest.mark.parametrize("params", [PREFILL, DECODE])
def test_an_explicit_transfer_mode_wins(params: dict[str, Any], wanted: Direction, mode: Direction) -> None:
    assert direction_of({**params, "transfer_mode": wanted}, mode) == wanted


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("params", [PREFILL, DECODE])
def test_otherwise_the_instances_mode_holds(params: dict[str, Any], mode: Direction) -> None:
    assert direction_of(params, mode) == mode


@pytest.mark.parametrize("remote_block_ids", [None, [], ()])
def test_a_decode_request_without_remote_blocks_can_only_be_pushed_to(remote_block_ids: Any) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": remote_block_ids}
    assert direction_of(params, "pull") == "push"
    assert direction_of({**params, "transfer_mode": "pull"}, "pull") == "push"


@pytest.mark.parametrize("nonsense", ["PUSH", "", 3, None, ["push"], {"push": 1}])
def test_a_transfer_mode_that_is_no_mode_is_not_obeyed(nonsense: object) -> None:
    assert direction_of({**PREFILL, "transfer_mode": nonsense}, "pull") == "pull"


def test_a_request_keeps_its_direction_when_the_mode_changes_until_it_ends() -> None:
    router = Router("push")
    assert router.direction("a", PREFILL) == "push"

    router.mode = "pull"

    assert router.direction("a", PREFILL) == "push"
    assert router.direction("b", PREFILL) == "pull"
    router.forget("a")
    assert router.known("a") is None
    assert router.direction("a", PREFILL) == "pull"


def test_requests_without_transfer_leave_no_trace() -> None:
    router = Router("push")
    assert router.direction("a", None) == "push"
    assert len(router) == 0


def test_a_mode_for_one_peer_leaves_the_others_alone() -> None:
    router = Router("push")
    router.set_mode("pull", peer="engine-7")

    assert router.direction("a", {**DECODE, "remote_engine_id": "engine-7"}) == "pull"
    assert router.direction("b", {**DECODE, "remote_engine_id": "engine-8"}) == "push"
    assert router.direction("c", {**PREFILL, "remote_engine_id": None}) == "push"
    assert router.mode == "push"


def test_a_mode_for_all_peers_forgets_the_exceptions() -> None:
    router = Router("push")
    router.set_mode("push", peer="engine-7")
    router.set_mode("pull")

    assert router.direction("a", {**DECODE, "remote_engine_id": "engine-7"}) == "pull"
    assert router.peer_modes == {}
