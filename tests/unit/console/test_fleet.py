"""Links that come back by themselves, and one state per tick for all of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvtop.agents.act import Answer, Command
from kvtop.agents.model import Delta, Snapshot
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.server import Agent, listen
from kvtop.console.fleet import link
from kvtop.console.fleet.conversation import Conversation, DialOptions
from kvtop.console.fleet.dial import dialler
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.fleet import Fleet
from kvtop.console.fleet.link import Link, backoff_s
from kvtop.console.fleet.state import FleetState
from kvtop.console.fleet.targets import LocalTarget, Target
from tests.unit.console.samples import FixedClock, agent, instance, transfer
from tests.unit.console.servers import eventually


class Script:
    """A conversation whose messages the test sends; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Snapshot | Delta | ConnectError | None] = asyncio.Queue()
        self.closed = False

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def updates(self, interval_s: float) -> AsyncIterator[Snapshot | Delta]:
        while (message := await self.queue.get()) is not None:
            if isinstance(message, ConnectError):
                raise message
            yield message

    def act(self, command: Command) -> AsyncIterator[Answer]:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True


class Dialler:
    """Answers each attempt with the next of its outcomes; waits when there is none."""

    def __init__(self, *outcomes: Script | ConnectError) -> None:
        self.outcomes: asyncio.Queue[Script | ConnectError] = asyncio.Queue()
        self.attempts = 0
        for outcome in outcomes:
            self.outcomes.put_nowait(outcome)

    async def __call__(self, target: Target) -> Conversation:
        outcome = await self.outcomes.get()
        self.attempts += 1
        if isinstance(outcome, ConnectError):
            raise outcome
        return outcome


async def collect(fleet: Fleet, states: list[FleetState]) -> None:
    """Keep all that a fleet publishes."""
    async for state in fleet.states():
        states.append(state)  # noqa: PERF401 - each at once, not all at the end


TARGET = LocalTarget("node")
REFUSED = ConnectError("node", "unreachable", "port 22 is closed")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(link, "BACKOFF_MOST_S", 0.002)


class Running:
    """A link under test, with how often it said that it changed."""

    def __init__(self, dial: Dialler) -> None:
        self.clock = FixedClock()
        self.changes = 0
        self.link = Link(TARGET, dial, self.clock, interval_s=1.0, changed=self._changed)
        self.task = asyncio.create_task(self.link.run())

    def _changed(self) -> None:
        self.changes += 1

    async def reaches(self, condition: Callable[[], object], what: str) -> None:
        await eventually(lambda: self.task.done() or condition(), what)
        assert not self.task.done(), self.task

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


SNAPSHOT = Snapshot(node=agent(), instances=[instance()], transfers=[transfer(1), transfer(2)])


async def test_a_link_follows_its_agent() -> None:
    script = Script()
    running = Running(Dialler(script))
    assert running.link.state.link.phase == "connecting"
    script.queue.put_nowait(SNAPSHOT)
    await running.reaches(lambda: running.link.state.live, "the snapshot")
    assert set(running.link.state.transfers) == {1, 2}
    script.queue.put_nowait(Delta(node=agent(), transfers=[transfer(3)], forgotten=[1]))
    await running.reaches(lambda: 3 in running.link.state.transfers, "the delta")
    assert set(running.link.state.transfers) == {2, 3}
    await running.stop()
    assert script.closed


async def test_a_state_that_was_handed_out_does_not_change_afterwards() -> None:
    script = Script()
    running = Running(Dialler(script))
    script.queue.put_nowait(SNAPSHOT)
    await running.reaches(lambda: running.link.state.live, "the snapshot")
    before = running.link.state
    script.queue.put_nowait(Delta(node=agent(), transfers=[transfer(3)]))
    await running.reaches(lambda: 3 in running.link.state.transfers, "the delta")
    assert set(before.transfers) == {1, 2}
    await running.stop()


async def test_a_lost_link_keeps_its_rows_says_since_when_and_why_and_comes_back() -> None:
    first, second = Script(), Script()
    dial = Dialler(first)
    running = Running(dial)
    first.queue.put_nowait(SNAPSHOT)
    await running.reaches(lambda: running.link.state.live, "the snapshot")
    running.clock.advance(100)
    lost_at_s = running.clock.now().wall_s
    first.queue.put_nowait(ConnectError("node", "lost", "the connection ended"))
    await running.reaches(lambda: running.link.state.link.phase == "lost", "the loss")
    running.clock.advance(7)
    dial.outcomes.put_nowait(REFUSED)
    await running.reaches(lambda: running.link.state.link.attempts == 1, "a failed attempt")
    state = running.link.state
    assert state.link.since_s == lost_at_s
    assert state.link.error is REFUSED
    assert [each.name for each in state.instances] == ["prefill-0"]
    assert first.closed
    dial.outcomes.put_nowait(second)
    second.queue.put_nowait(Snapshot(node=agent(), instances=[instance("decode-0")]))
    await running.reaches(lambda: running.link.state.live, "the way back")
    assert [each.name for each in running.link.state.instances] == ["decode-0"]
    assert not running.link.state.transfers
    await running.stop()


async def test_waits_grow_to_a_limit_and_vary() -> None:
    assert backoff_s(1, lambda: 0.0) < backoff_s(1, lambda: 1.0)
    assert backoff_s(1000, lambda: 0.5) == link.BACKOFF_MOST_S


async def test_a_fleet_publishes_at_once_and_then_once_for_all_nodes() -> None:
    scripts = [Script() for _ in range(20)]
    by_label = {f"n{n}": script for n, script in enumerate(scripts)}

    async def dial(target: Target) -> Conversation:
        return by_label[target.label]

    fleet = Fleet([LocalTarget(label) for label in by_label], dial, interval_s=0.2)
    states: list[FleetState] = []
    task = asyncio.create_task(collect(fleet, states))
    await eventually(lambda: states, "the first state")
    assert [node.target for node in states[0].nodes] == list(by_label)
    assert not any(node.live for node in states[0].nodes)
    for script in scripts:
        script.queue.put_nowait(SNAPSHOT)
    await eventually(lambda: all(node.live for node in states[-1].nodes), "all nodes")
    assert len(states) <= 3
    before = len(states)
    for _ in range(5):
        for script in scripts:
            script.queue.put_nowait(Delta(node=agent(), transfers=[transfer(9)]))
    await eventually(lambda: all(9 in node.transfers for node in states[-1].nodes), "the deltas")
    assert len(states) - before <= 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await fleet.aclose()
    assert all(script.closed for script in scripts)


async def test_a_bug_in_a_link_is_not_swallowed() -> None:
    async def dial(target: Target) -> Conversation:
        raise RuntimeError("made by the test")

    async def follow() -> None:
        async for _ in Fleet([TARGET], dial).states():
            pass

    with pytest.raises(RuntimeError, match="made by the test"):
        await asyncio.wait_for(follow(), 5)


async def test_a_restarted_agent_is_found_again() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        paths = RuntimePaths.at(Path(folder))
        paths.prepare()
        fleet = Fleet([LocalTarget("node", paths.view)], dialler(DialOptions()), interval_s=0.1)
        states: list[FleetState] = []
        task = asyncio.create_task(collect(fleet, states))
        await eventually(lambda: states and states[-1].nodes[0].link.phase == "lost", "no agent")
        for _ in range(2):
            served = Agent()
            servers = await listen(served, paths)
            await eventually(lambda: states[-1].nodes[0].live, "the agent")
            node = states[-1].nodes[0].node
            assert node is not None
            assert node.agent_started_ns == served.started_ns
            for server in servers:
                server.close()
            paths.view.unlink()
            for other in [
                each for each in asyncio.all_tasks() if "converse" in str(each) or "serve" in str(each)
            ]:
                other.cancel()
            await eventually(lambda: states[-1].nodes[0].link.phase == "lost", "the loss")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
