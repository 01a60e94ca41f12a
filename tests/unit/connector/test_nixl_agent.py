"""Both halves on one NIXL agent: memory and peers once, and every notification to the half that it is for.

Runs on real NIXL agents (DRAM, UCX over loopback).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from kvtop.connector.nixl_agent import HalfAgent, SharedNixlAgent
from kvtop.connector.upstream import open_nixl_agent
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm


def _agent(progress_delay_us: int | None = 1000) -> Any:
    from nixl._api import nixl_agent_config

    return open_nixl_agent(str(uuid.uuid4()), nixl_agent_config(capture_telemetry=True), progress_delay_us)


@pytest.fixture
def peer() -> Any:
    return _agent()


@pytest.fixture
def shared() -> Iterator[SharedNixlAgent]:
    agent = SharedNixlAgent(_agent())
    yield agent
    agent.handshakes.shutdown()


@pytest.fixture
def halves(shared: SharedNixlAgent) -> tuple[HalfAgent, HalfAgent]:
    push, pull = shared.half("push"), shared.half("pull")
    pull.tracks = lambda request_id: request_id == "held-for-a-pull"
    return push, pull


class Inbox:
    """Collects what reaches each half, since a message can arrive before or after its sibling."""

    def __init__(self, push: HalfAgent, pull: HalfAgent) -> None:
        self._halves = {"push": push, "pull": pull}
        self.seen: dict[str, list[bytes]] = {"push": [], "pull": []}

    def holds(self, count: int) -> bool:
        for name, half in self._halves.items():
            self.seen[name] += [message for some in half.get_new_notifs().values() for message in some]
        return sum(map(len, self.seen.values())) >= count


def test_each_notification_reaches_the_half_that_it_is_for(
    shared: SharedNixlAgent, halves: tuple[HalfAgent, HalfAgent], peer: Any
) -> None:
    name = peer.add_remote_agent(shared.metadata())
    for message in (
        b"PUSH_REG:\x81\xa1a\x01",
        b"HB:one,two",
        b"held-for-a-pull:1",
        b"waiting-for-a-push:1",
        b"with:colons:held-for-a-pull:1",
        b"\xff\xfe no text at all",
        b"HB:\xff",
        b"held-for-a-pull:many",
    ):
        peer.send_notif(name, notif_msg=message)

    inbox = Inbox(*halves)
    wait_until(lambda: inbox.holds(9), "all notifications to arrive")

    assert sorted(inbox.seen["pull"]) == [b"HB:one,two", b"held-for-a-pull:1"]
    assert sorted(inbox.seen["push"]) == [
        b"HB:one,two",
        b"HB:\xff",
        b"PUSH_REG:\x81\xa1a\x01",
        b"held-for-a-pull:many",
        b"waiting-for-a-push:1",
        b"with:colons:held-for-a-pull:1",
        b"\xff\xfe no text at all",
    ]


def test_an_arrival_wakes_its_half_although_the_other_half_fetched_it(
    shared: SharedNixlAgent, halves: tuple[HalfAgent, HalfAgent], peer: Any
) -> None:
    push, pull = halves
    woken: list[bool] = []
    push.on_arrival = lambda: woken.append(True)
    peer.send_notif(peer.add_remote_agent(shared.metadata()), notif_msg=b"PUSH_REG:x")

    def the_pull_half_polls() -> bool:
        assert pull.get_new_notifs() == {}
        return bool(woken)

    wait_until(the_pull_half_polls, "the push half to be woken")

    assert [message for some in push.get_new_notifs().values() for message in some] == [b"PUSH_REG:x"]


def test_a_peer_is_added_once_and_removed_when_neither_half_uses_it(
    shared: SharedNixlAgent, halves: tuple[HalfAgent, HalfAgent], peer: Any
) -> None:
    push, pull = halves
    metadata = peer.get_agent_metadata()
    names = {push.add_remote_agent(metadata), pull.add_remote_agent(metadata)}
    assert len(names) == 1
    (name,) = names

    push.remove_remote_agent(name)
    shared.handshakes.submit(lambda: None).result()
    assert shared.agent.check_remote_metadata(name)

    pull.remove_remote_agent(name)
    shared.handshakes.submit(lambda: None).result()
    assert not shared.agent.check_remote_metadata(name)

    assert pull.add_remote_agent(metadata) == name
    assert shared.agent.check_remote_metadata(name)


def test_memory_is_registered_once_and_kept_until_both_halves_let_go(
    shared: SharedNixlAgent, halves: tuple[HalfAgent, HalfAgent]
) -> None:
    push, pull = halves
    memory: Any = np.zeros(1 << 16, dtype=np.uint8)
    regions = shared.agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    first = push.register_memory(regions)
    assert pull.register_memory(regions) is first

    push.deregister_memory(regions)
    assert pull.registrations == [first]
    pull.deregister_memory(regions)
    assert pull.registrations == []


def test_both_halves_give_peers_the_same_address(halves: tuple[HalfAgent, HalfAgent]) -> None:
    push, pull = halves
    assert push.get_agent_metadata() == pull.get_agent_metadata()


def test_an_idle_agents_progress_thread_sleeps_where_cores_are_few() -> None:
    """Upstream's own setting spins a whole core; the other agents of this module sleep too."""
    kept = _agent(progress_delay_us=1000)
    process = psutil.Process()
    before = process.cpu_times()
    started = time.monotonic()
    wait_until(lambda: time.monotonic() - started > 1.5, "a measuring window to pass", poll_s=0.5)
    after = process.cpu_times()
    assert kept is not None
    assert (after.user + after.system) - (before.user + before.system) < 0.75, "a core is spinning"
