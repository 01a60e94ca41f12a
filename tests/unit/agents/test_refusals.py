"""Who may only look cannot push out of the record what others did, however often it asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from kvtop.agents.act import MAX_NAME, MAX_TARGETS, Command, Outcome
from kvtop.agents.commands import KEYS_KEPT
from kvtop.agents.refusals import MOST, Refusals
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.who import Who
from kvtop.agents.wire import encode_frame
from tests.support.agent import client_hello, messages_in, running_agent, runtime_folder, send_raw

VIEWER = Who("view", 1000)


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


async def test_the_first_refusals_of_a_minute_are_recorded_and_the_others_counted() -> None:
    counted: asyncio.Queue[tuple[Who, int]] = asyncio.Queue()
    refusals = Refusals(lambda who, count: counted.put_nowait((who, count)), most=3, window_s=0.05)

    assert [refusals.recorded(VIEWER) for _ in range(5)] == [True, True, True, False, False]

    assert await asyncio.wait_for(counted.get(), 10) == (VIEWER, 2)
    assert refusals.recorded(VIEWER)  # another minute
    refusals.close()
    assert counted.empty()


async def test_each_client_has_its_own_measure_and_a_key_is_one_from_wherever_it_comes() -> None:
    counted: list[tuple[Who, int]] = []
    refusals = Refusals(lambda who, count: counted.append((who, count)), most=1)
    one = [Who("view", 0, "SHA256:one", f"10.0.0.1:{port}") for port in range(3)]

    assert [refusals.recorded(who) for who in one] == [True, False, False]
    assert [refusals.recorded(Who("view", 0, "SHA256:two")), refusals.recorded(VIEWER)] == [True, True]

    refusals.close()
    assert counted == [(Who("view", 0, "SHA256:one"), 2)]


def test_a_flood_on_the_view_socket_leaves_a_few_short_records_and_their_number(paths: RuntimePaths) -> None:
    flood = Command(
        verb="drain" * 100,
        targets=["x" * MAX_NAME] * MAX_TARGETS,
        arguments={str(number): "y" * MAX_NAME for number in range(16)},
        key="k" * MAX_NAME,
        source="s" * MAX_NAME,
    )
    with running_agent(paths) as agent:
        for _ in range(2):
            frames = [encode_frame(flood)] * MOST
            answers = messages_in(send_raw(paths.view, client_hello(), *frames, timeout_s=30))[1:]
        agent.terminate()
        assert agent.wait(20) == 0

    assert [(each.state, each.audited) for each in answers if isinstance(each, Outcome)] == [
        ("refused", False)
    ] * MOST
    *records, last = [json.loads(line) for line in paths.audit.read_text().splitlines()]
    assert [each["state"] for each in records] == ["refused"] * MOST
    assert (last["event"], last["count"], last["socket"]) == ("refused-more", MOST, "view")
    assert last["uid"] == records[0]["uid"]
    assert len(paths.audit.read_bytes()) < 1000 * (MOST + 1)


def test_who_may_only_look_takes_no_operators_key_out_of_memory(paths: RuntimePaths) -> None:
    """A command that comes again under its key must not be run again, whatever viewers sent meanwhile."""
    with running_agent(paths):
        mine = encode_frame(Command(verb="undrain", targets=["nobody"], key="mine"))
        send_raw(paths.operate, client_hello(), mine)
        theirs = [
            encode_frame(Command(verb="undrain", targets=["x"], key=str(n))) for n in range(KEYS_KEPT + 1)
        ]
        send_raw(paths.view, client_hello(), *theirs, timeout_s=60)
        *_, again = messages_in(send_raw(paths.operate, client_hello(), mine))

    assert isinstance(again, Outcome)
    assert again.repeated
