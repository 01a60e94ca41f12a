"""What the agent says of an instance follows from its processes, also when one comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kvtop.agents.events import InstanceReport
from kvtop.agents.instances import GONE_KEPT
from kvtop.agents.latency import NS
from kvtop.agents.server import Agent
from tests.support.agent import hello


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_an_engine_that_comes_back_under_a_configured_engine_id_serves_again(dead_pid: int) -> None:
    instances = Agent().instances
    instances.detach(instances.attach(hello(pid=dead_pid), 1 * NS), 2 * NS)
    assert instances.freeze(2 * NS)[0].state == "down"

    instances.attach(hello(), 3 * NS)
    instances.refresh(4 * NS)

    (instance,) = instances.freeze(4 * NS)
    assert (instance.state, instance.pids) == ("serving", [os.getpid()])


def test_an_engine_that_comes_back_before_its_end_was_seen_serves_again(dead_pid: int) -> None:
    instances = Agent().instances
    old = instances.attach(hello(pid=dead_pid), 1 * NS)
    old.attached = False

    instances.attach(hello(), 2 * NS)
    instances.refresh(3 * NS)

    assert instances.freeze(3 * NS)[0].state == "serving"


def test_a_new_incarnation_takes_the_place_of_one_that_is_seen_to_end_only_later(dead_pid: int) -> None:
    instances = Agent().instances
    old = instances.attach(hello(pid=dead_pid, engine_id="old"), 1 * NS)
    instances.attach(hello(engine_id="new"), 2 * NS)

    instances.detach(old, 3 * NS)
    instances.refresh(4 * NS)

    assert [each.engine_id for each in instances.freeze(4 * NS)] == ["new"]


def test_of_the_instances_that_are_gone_the_latest_few_stay_on_show(dead_pid: int) -> None:
    instances = Agent().instances
    for number in range(GONE_KEPT + 10):
        at_ns = number * NS
        instances.detach(instances.attach(hello(f"pod-{number}", pid=dead_pid), at_ns), at_ns)
    instances.refresh(99 * NS)

    shown = {each.name for each in instances.freeze(99 * NS)}

    assert shown == {f"pod-{number}" for number in range(10, GONE_KEPT + 10)}


def test_events_that_were_dropped_are_told_by_one_gap_only() -> None:
    instances = Agent().instances
    attachment = instances.attach(hello(), 1 * NS)
    instances.heard(attachment, 100, 2 * NS)
    instances.detach(attachment, 3 * NS)

    instances.attach(hello(previous_agent_lost_ns=3 * NS, dropped_events=107), 4 * NS)

    assert [gap.dropped_events for gap in instances.freeze(4 * NS)[0].gaps] == [100, 7]


def test_a_new_agent_does_not_guess_how_many_events_a_gap_cost() -> None:
    instances = Agent().instances
    instances.attach(hello(previous_agent_lost_ns=1 * NS, dropped_events=107), 2 * NS)

    (instance,) = instances.freeze(2 * NS)
    assert [gap.dropped_events for gap in instance.gaps] == [None]
    assert instance.dropped_events == 107


def report(**facts: Any) -> InstanceReport:
    return InstanceReport(**{"at_ns": 1, "mode": "push", **facts})


def test_what_an_engine_reports_holds_not_what_it_said_when_it_came() -> None:
    instances = Agent().instances
    attachment = instances.attach(hello(mode="push", orders=["set-mode"]), 1 * NS, lambda _message: True)

    instances.take(attachment, report(mode="pull", peer_modes={"d": "push"}, quarantined_blocks=3), 2 * NS)

    (instance,) = instances.freeze(2 * NS)
    assert (instance.mode, instance.peer_modes) == ("pull", {"d": "push"})
    assert (instance.quarantined_blocks, instance.orders) == (3, ["set-mode"])


def test_draining_ends_in_drained_once_nothing_is_in_the_way() -> None:
    instances = Agent().instances
    attachment = instances.attach(hello(), 1 * NS)
    seen = []
    reports = (
        report(blockers={"leases": 2}),
        report(draining=True, blockers={"leases": 2, "writes": 1}),
        report(draining=True, blockers={"leases": 0}),
        report(blockers={}),
    )
    for second, each in enumerate(reports):
        instances.take(attachment, each, second * NS)
        (instance,) = instances.freeze(second * NS)
        seen.append((instance.state, instance.draining, instance.drained, instance.state_reason))

    assert seen == [
        ("serving", False, False, ""),
        ("draining", True, False, "left: 2 leases, 1 write"),
        ("drained", True, True, ""),
        ("serving", False, False, ""),
    ]


def test_a_draining_engine_that_falls_silent_is_stale() -> None:
    instances = Agent().instances
    instances.take(instances.attach(hello(), 1 * NS), report(draining=True), 1 * NS)

    instances.refresh(60 * NS)

    assert instances.freeze(60 * NS)[0].state == "stale"


def test_what_held_in_an_engine_ends_with_it(dead_pid: int) -> None:
    instances = Agent().instances
    gone = instances.attach(hello(pid=dead_pid), 1 * NS)
    instances.take(gone, report(mode="pull", draining=True, blockers={"writes": 1}), 1 * NS)
    instances.detach(gone, 2 * NS)
    (instance,) = instances.freeze(2 * NS)
    assert (instance.state, instance.draining, instance.blockers) == ("down", False, {})

    instances.attach(hello(), 3 * NS)

    (instance,) = instances.freeze(3 * NS)
    assert (instance.state, instance.mode, instance.draining) == ("serving", "push", False)
    assert instance.quarantined_blocks is None


def test_an_engine_that_only_lost_its_connection_is_remembered() -> None:
    instances = Agent().instances
    attachment = instances.attach(hello(orders=["set-mode"]), 1 * NS, lambda _message: True)
    instances.take(attachment, report(mode="pull", draining=True), 1 * NS)
    instances.detach(attachment, 2 * NS)
    assert instances.freeze(2 * NS)[0].orders == []

    instances.attach(hello(orders=["set-mode"]), 3 * NS, lambda _message: True)

    (instance,) = instances.freeze(3 * NS)
    assert (instance.mode, instance.draining, instance.orders) == ("pull", True, ["set-mode"])
