"""Both halves on one NIXL agent: memory and peers once, and every notification to the half that it is for.

Runs on real NIXL agents (DRAM, UCX over loopback).
"""

from __future__ import annotations

import os
import subprocess
import sys
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


def _agent(progress_delay_us: int | None = 1000, *, scatter_gather: bool = False) -> Any:
    from nixl._api import nixl_agent_config

    config = nixl_agent_config(capture_telemetry=True)
    return open_nixl_agent(str(uuid.uuid4()), config, progress_delay_us, scatter_gather=scatter_gather)


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


OPEN_AN_AGENT = """
import sys
from kvtop.connector.upstream import open_nixl_agent
from nixl._api import nixl_agent_config
open_nixl_agent("a", nixl_agent_config(), 1000, scatter_gather=sys.argv[1] == "True")
"""


@pytest.mark.parametrize(
    ("setting", "environment", "state"),
    [
        (False, {}, "disabled"),
        (True, {}, "enabled"),
        (True, {"NIXL_UCX_SGL_ENABLE": "n"}, "disabled"),
        (False, {"NIXL_UCX_SGL_ENABLE": "y"}, "enabled"),
    ],
)
def test_scatter_gather_is_nixls_own_choice_unless_set_and_the_environment_wins(
    setting: bool, environment: dict[str, str], state: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "NIXL_UCX_SGL_ENABLE"}
    opened = subprocess.run(
        [sys.executable, "-c", OPEN_AN_AGENT, str(setting)],
        env={**kept, **environment, "NIXL_LOG_LEVEL": "DEBUG"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"UCX SGL offload {state}" in opened.stdout + opened.stderr


def test_scatter_gather_is_set_for_kvtops_agent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_UCX_SGL_ENABLE", raising=False)
    assert _agent(scatter_gather=True) is not None
    assert "NIXL_UCX_SGL_ENABLE" not in os.environ


def test_scattered_writes_arrive_whole_with_scatter_gather() -> None:
    """More descriptors than NIXL gives to one thread, in another order on each side."""
    count, size = 3000, 4096
    writer, reader = _agent(scatter_gather=True), _agent()
    source: Any = np.arange(count * size // 8, dtype=np.uint64).reshape(count, -1)
    target: Any = np.zeros((2 * count, size // 8), np.uint64)
    for agent, memory in ((writer, source), (reader, target)):
        agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    slots = [2 * (number * 7 % count) for number in range(count)]
    blocks = [(source.ctypes.data + number * size, size, 0) for number in range(count)]
    places = [(target.ctypes.data + slot * size, size, 0) for slot in slots]
    peer = writer.add_remote_agent(reader.get_agent_metadata())
    ours = writer.prep_xfer_dlist("NIXL_INIT_AGENT", writer.get_xfer_descs(blocks, "DRAM"))
    theirs = writer.prep_xfer_dlist(peer, writer.get_xfer_descs(places, "DRAM"))
    every = list(range(count))
    handle = writer.make_prepped_xfer("WRITE", ours, every, theirs, every, notif_msg=b"written")
    writer.transfer(handle)

    def told() -> bool:
        writer.check_xfer_state(handle)
        return b"written" in [message for some in reader.get_new_notifs().values() for message in some]

    wait_until(told, "the notification", timeout_s=30)

    assert (target[slots] == source).all()
    assert not target[1::2].any()
