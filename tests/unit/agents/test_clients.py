"""What consoles and scripts can rely on: nothing missed, nothing left over, and an end where there is one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvtop.agents.client import connect_unix
from kvtop.agents.events import TransferEvent
from kvtop.agents.mirror import Mirror
from kvtop.agents.model import Snapshot, Subscribe
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.server import Agent, listen
from kvtop.agents.wire import encode_frame
from tests.support.agent import client_hello, running_agent, runtime_folder

CLI = [sys.executable, "-m", "kvtop.agents.cli"]


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


def report(agent: Agent, request_id: str, step: Any, **facts: Any) -> None:
    event = TransferEvent(at_ns=1, side="prefill", request_id=request_id, step=step, **facts)
    agent.ledger.apply("engine", event)


async def test_a_console_that_fell_far_behind_keeps_no_row_that_the_agent_forgot(paths: RuntimePaths) -> None:
    paths.prepare()
    agent, mirror = Agent(finished_kept=10), Mirror()
    report(agent, "live at first", "queued")
    servers = await listen(agent, paths)
    async with await connect_unix(paths.view) as console:
        updates = console.updates(0.1)
        mirror.apply(await anext(updates))
        assert [row.stage for row in mirror.transfers.values()] == ["queued"]
        report(agent, "live at first", "done", bytes=1)
        for number in range(100):
            report(agent, f"r-{number}", "done", bytes=1)

        async with asyncio.timeout(10):
            message = await anext(updates)
        mirror.apply(message)

    assert isinstance(message, Snapshot)
    assert sorted(mirror.transfers) == [row.id for row in agent.ledger.snapshot(10)]
    for server in servers:
        server.close()


async def test_a_conversation_that_cannot_go_on_ends(
    paths: RuntimePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.prepare()
    agent = Agent()
    servers = await listen(agent, paths)
    async with await connect_unix(paths.view) as console:
        updates = console.updates(0.1)
        await anext(updates)
        monkeypatch.setattr(agent.ledger, "changes", None)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(10):
                await anext(updates)
    for server in servers:
        server.close()


def test_a_script_that_asks_through_stdio_is_answered_although_its_input_has_ended(
    paths: RuntimePaths,
) -> None:
    question = client_hello() + encode_frame(Subscribe())
    with running_agent(paths):
        result = subprocess.run(
            [*CLI, "--runtime-dir", str(paths.folder), "stdio"],
            input=question,
            capture_output=True,
            check=True,
            timeout=20,
        )

    assert b"welcome" in result.stdout
    assert b"snapshot" in result.stdout


def test_an_interrupt_has_its_own_exit_code(paths: RuntimePaths) -> None:
    with running_agent(paths):
        process = subprocess.Popen(
            [*CLI, "--runtime-dir", str(paths.folder), "stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(client_hello())
        process.stdin.flush()
        assert process.stdout.read(1)  # it is in the midst of its conversation
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)

    assert process.returncode == 130


async def test_a_bug_in_judging_instances_does_not_end_the_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent, reachable = Agent(), iter([True, True, False])
    monkeypatch.setattr("kvtop.agents.server.REFRESH_S", 0.01)
    monkeypatch.setattr(agent.ledger, "close_overdue", lambda _now_ns: 1 / 0)

    async with asyncio.timeout(10):
        await agent.keep_time(None, lambda: next(reachable))

    assert caplog.text.count("a bug in kvtop kept instances from being judged") == 3
