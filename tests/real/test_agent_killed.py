"""The node agent may die at any moment: the engines neither notice nor wait, and its successor says so."""

from __future__ import annotations

import random

import psutil
import pytest

from kvtop.agents.model import Snapshot
from kvtop.console.demo.load import make_prompt
from kvtop.console.demo.servers import Server
from tests.support.pair import Load, RunningPair, complete_all
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("pair", ["kvtop-push"], indirect=True)
def test_a_killed_agent_costs_no_request_and_is_replaced(pair: RunningPair, aggregated: Server) -> None:
    source = random.Random(30)
    prompts = [make_prompt(30_000 + number, source) for number in range(40)]
    expected = complete_all(aggregated.url, prompts)
    first = pair.snapshot().node

    with Load(pair.url, prompts, in_flight=3) as load:
        wait_until(lambda: load.finished >= 5, "the load to be under way", timeout_s=60)
        psutil.Process(first.agent_pid).kill()
        killed_at = load.finished
        wait_until(lambda: _agent_pid(pair) not in (None, first.agent_pid), "another agent", timeout_s=30)
        answers = load.results()

    assert killed_at < len(prompts), "the agent was to be killed under load"
    assert answers == expected
    complete_all(pair.url, [make_prompt(31_000, source)])
    wait_until(lambda: _done(pair.snapshot()) >= 1, "the new agent's ledger to show a finished transfer")

    after = pair.snapshot()
    assert after.node.agent_pid != first.agent_pid
    for instance in after.instances:
        assert instance.state == "serving"
        assert instance.gaps, f"{instance.name} shows no gap"
        gap = instance.gaps[0]
        assert first.agent_started_ns < gap.from_ns < gap.to_ns
        assert gap.reason


def _agent_pid(pair: RunningPair) -> int | None:
    try:
        return pair.snapshot().node.agent_pid
    except OSError:
        return None


def _done(snapshot: Snapshot) -> int:
    return sum(row.stage == "done" for row in snapshot.transfers)
