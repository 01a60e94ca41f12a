"""What clients may send to act, and what comes back, whatever they send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.agents.act import Answer, Command, Outcome, Plan
from kvtop.agents.client import AgentConnection, connect_unix
from kvtop.agents.commands import RUNS_AT_ONCE, VERBS
from kvtop.agents.events import Direction, InstanceReport, OrderAnswer, Side, Stage, TransferEvent
from kvtop.agents.orders import ORDER_KINDS, Order
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import Refusal, encode_frame
from tests.support.acting import AGENT_CLI, ActingNode, acting_node
from tests.support.agent import (
    agent_log,
    agent_pid,
    await_snapshot,
    client_hello,
    frame,
    hello,
    messages_in,
    reporting,
    running_agent,
    runtime_folder,
    send_raw,
)
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def node() -> Iterator[ActingNode]:
    """A node that lives through all that this module's tests send."""
    with runtime_folder() as folder, acting_node(folder, "--rate", "0.001") as running:
        yield running
        assert running.agent.poll() is None, "the agent died of what it was sent"
        assert "a bug in kvtop" not in agent_log(folder)


def answers_in(raw: bytes) -> list[Any]:
    """The messages of an agent, its welcome left out."""
    return messages_in(raw)[1:]


def ask(node: ActingNode, *commands: Command, door: str = "operate") -> list[Any]:
    """Send commands, say that no more will come, and return all answers."""
    return answers_in(
        send_raw(getattr(node.paths, door), client_hello(), *map(encode_frame, commands), timeout_s=30)
    )


def outcome_of(answers: list[Any]) -> Outcome:
    assert isinstance(answers[-1], Outcome)
    return answers[-1]


@asynccontextmanager
async def operator(paths: RuntimePaths) -> AsyncIterator[AgentConnection]:
    async with await connect_unix(paths.operate) as connection:
        yield connection


async def collected(answers: AsyncIterator[Answer]) -> list[Answer]:
    return [answer async for answer in answers]


def test_the_view_socket_refuses_every_verb_and_records_it(node: ActingNode) -> None:
    for verb in VERBS:
        outcome = outcome_of(ask(node, Command(verb=verb, targets=["sim-prefill-0"]), door="view"))

        assert (outcome.exit_code, outcome.state) == (1, "refused")
        assert "the view socket only looks: connect to operate.sock" in outcome.message
        record = node.audit()[-1]
        assert (record["socket"], record["verb"], record["state"]) == ("view", verb, "refused")


def test_who_says_that_no_more_will_come_is_still_answered(node: ActingNode) -> None:
    """Such as a script behind `kvtop-agent stdio`."""
    question = client_hello() + encode_frame(Command(id=7, verb="undrain", targets=["sim-prefill-0"]))
    done = subprocess.run(
        [*AGENT_CLI, "stdio"],
        input=question,
        capture_output=True,
        env=node.environment,
        timeout=30,
        check=True,
    )

    plan, outcome = answers_in(done.stdout)
    assert isinstance(plan, Plan)
    assert (plan.id, outcome.id, outcome.exit_code) == (7, 7, 0)


def test_several_commands_of_one_connection_are_told_apart(node: ActingNode) -> None:
    answers = ask(
        node,
        Command(id=1, verb="undrain", targets=["sim-prefill-0"]),
        Command(id=2, verb="undrain", targets=["nobody"]),
        Command(id=3, verb="mode", targets=["sim-decode-0"], arguments={"mode": "push"}),
    )

    ended = {each.id: each.exit_code for each in answers if isinstance(each, Outcome)}
    assert ended == {1: 0, 2: 2, 3: 0}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (Command(verb="explode", targets=["x"]), "there is no command 'explode'; there are: mode, drain"),
        (Command(verb="", targets=["x"]), "there is no command ''"),
        (Command(verb="drain"), "drain takes at least one target, not 0"),
        (Command(verb="mode", targets=["a", "b"]), "mode takes exactly one target, not 2"),
        (Command(verb="mode", targets=["sim-prefill-0"]), "mode needs the argument 'mode'"),
        (
            Command(verb="mode", targets=["sim-prefill-0"], arguments={"mode": "up"}),
            "mode is push or pull, not 'up'",
        ),
        (
            Command(verb="drain", targets=["sim-prefill-0"], arguments={"soon": "1"}),
            "drain has no argument 'soon'; it has: none",
        ),
        (Command(verb="evict", targets=["sim-prefill-0"]), "evict needs the argument 'peer'"),
        (
            Command(verb="evict", targets=["sim-prefill-0"], arguments={"peer": "a", "peer_engine_id": "b"}),
            "name the peer once",
        ),
        (Command(verb="drain", targets=["x"] * 300), "300 targets are too many"),
        (Command(verb="cancel", targets=["y" * 513]), "a name has at most 512 characters"),
    ],
)
def test_what_no_verb_takes_is_refused_as_usage(node: ActingNode, command: Command, said: str) -> None:
    outcome = outcome_of(ask(node, command))

    assert (outcome.exit_code, outcome.state) == (2, "usage")
    assert said in outcome.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"verb": 5},
        {},
        {"verb": "drain", "targets": "sim-prefill-0"},
        {"verb": "drain", "targets": [None]},
        {"verb": "drain", "arguments": ["a"]},
        {"verb": "drain", "timeout_s": 0},
        {"verb": "drain", "timeout_s": -1},
        {"verb": "drain", "timeout_s": 1e9},
        {"verb": "drain", "timeout_s": float("inf")},
        {"verb": "drain", "timeout_s": float("nan")},
        {"verb": "drain", "serving_elsewhere": -1},
        {"verb": "drain", "dry_run": "no"},
    ],
)
def test_a_malformed_command_closes_its_connection_with_the_reason(
    node: ActingNode, wrong: dict[str, Any]
) -> None:
    body = msgspec.msgpack.encode({"type": "command", **wrong})

    (answer,) = answers_in(send_raw(node.paths.operate, client_hello(), frame(body)))

    assert isinstance(answer, Refusal)
    assert "cannot be decoded" in answer.reason


def test_what_was_planned_with_another_agent_is_not_done_by_this_one(node: ActingNode) -> None:
    """It numbers its transfers anew."""
    outcome = outcome_of(ask(node, Command(verb="cancel", targets=["1"], agent_started_ns=1)))

    assert (outcome.exit_code, outcome.state) == (1, "refused")
    assert "the agent was started anew since this was planned" in outcome.message


def test_a_plan_can_be_done_as_it_was_shown(node: ActingNode) -> None:
    plan, _ = ask(node, Command(verb="undrain", targets=["sim-prefill-0"], dry_run=True))

    again = Command(verb="undrain", targets=plan.target_ids, agent_started_ns=plan.agent_started_ns)

    assert outcome_of(ask(node, again)).exit_code == 0


def test_a_client_that_sees_others_serve_elsewhere_needs_no_force(node: ActingNode) -> None:
    both = ["sim-prefill-0", "sim-prefill-1"]
    assert outcome_of(ask(node, Command(verb="drain", targets=both))).exit_code == 1
    assert outcome_of(ask(node, Command(verb="drain", targets=both, serving_elsewhere=1))).exit_code == 0
    assert outcome_of(ask(node, Command(verb="undrain", targets=both))).exit_code == 0


def test_neither_a_viewer_nor_a_dry_run_takes_a_key(node: ActingNode) -> None:
    command = Command(verb="undrain", targets=["sim-prefill-0"], key="theirs")
    assert outcome_of(ask(node, command, door="view")).state == "refused"
    assert outcome_of(ask(node, msgspec.structs.replace(command, dry_run=True))).state == "planned"

    first, again = (outcome_of(ask(node, command)) for _ in range(2))

    assert (first.state, first.repeated, again.repeated) == ("done", False, True)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(
        Command,
        id=st.integers(-(2**63), 2**63 - 1),
        verb=st.sampled_from([*VERBS, "", "run"]),
        targets=st.lists(
            st.sampled_from(["sim-prefill-0", "sim-decode-1", "1", "0", "", "\0", "-1", "nobody"]), max_size=3
        ),
        arguments=st.dictionaries(
            st.sampled_from(["mode", "peer", "peer_engine_id", "x"]),
            st.sampled_from(["push", "pull", "sim-decode-0", "", "?"]),
            max_size=3,
        ),
        dry_run=st.booleans(),
        wait=st.booleans(),
        timeout_s=st.just(0.05),
        force=st.booleans(),
        key=st.sampled_from(["", "k"]),
    )
)
def test_every_well_formed_command_has_one_outcome(node: ActingNode, command: Command) -> None:
    answers = ask(node, command)

    assert [isinstance(each, Outcome) for each in answers].count(True) == 1
    outcome = outcome_of(answers)
    assert outcome.id == command.id
    assert outcome.exit_code in (0, 1, 2, 4)
    assert "a bug in kvtop" not in outcome.message
    assert agent_pid(node.paths) is not None


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


async def test_no_more_commands_than_can_be_waited_for_are_under_way(paths: RuntimePaths) -> None:
    taking = hello("mute", orders=list(ORDER_KINDS))
    with running_agent(paths), reporting(paths, start_agent=False, hello=taking):
        commands = [
            Command(id=n, verb="undrain", targets=["mute"], timeout_s=2) for n in range(RUNS_AT_ONCE + 1)
        ]
        raw = await asyncio.to_thread(
            send_raw, paths.operate, client_hello(), *map(encode_frame, commands), timeout_s=30
        )

    ended = [each for each in answers_in(raw) if isinstance(each, Outcome)]
    assert [each.state for each in ended].count("timed-out") == RUNS_AT_ONCE
    (refused,) = [each for each in ended if each.state == "refused"]
    assert "64 commands are under way already" in refused.message


async def test_an_engine_that_answers_but_does_not_do_it_is_found_out(paths: RuntimePaths) -> None:
    """An answer alone proves nothing."""
    taking = hello("liar", orders=list(ORDER_KINDS))
    with running_agent(paths), reporting(paths, start_agent=False, hello=taking, on_order=None) as reporter:
        reporter.put(InstanceReport(at_ns=1, mode="push"))
        reporter._on_order = lambda order: reporter.put(OrderAnswer(1, order.order_id, True))
        await asyncio.to_thread(await_snapshot, paths, lambda s: s.instances, "the instance")
        async with operator(paths) as connection:
            drain = await collected(connection.act(Command(verb="drain", targets=["liar"], force=True)))
            mode = await collected(
                connection.act(Command(verb="mode", targets=["liar"], arguments={"mode": "pull"}))
            )

    for answers, said in ((drain, "reports that it is not draining"), (mode, "does not report pull")):
        outcome = outcome_of(list(answers))
        assert (outcome.exit_code, outcome.state) == (1, "failed")
        assert said in outcome.message


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("new requests get 503", "; new requests get 503"),
        ("new requests are still taken: no middleware", "; new requests are still taken: no middleware"),
        (None, "; its API server does not report here: whether it still takes new requests is not known"),
    ],
)
async def test_a_drain_tells_what_becomes_of_new_requests(
    paths: RuntimePaths, said: str | None, told: str
) -> None:
    """The engine answers for transfers, its API servers for requests; both must be heard."""
    core = hello("p", process="engine-core", orders=list(ORDER_KINDS))
    door = hello("p", process="api-server", pid=os.getppid(), orders=["set-draining"])
    with running_agent(paths), contextlib.ExitStack() as reporters:
        engine = reporters.enter_context(reporting(paths, start_agent=False, hello=core))
        engine._on_order = lambda order: _drain(engine, order)
        if said is not None:
            server = reporters.enter_context(reporting(paths, start_agent=False, hello=door))
            server._on_order = lambda order: server.put(OrderAnswer(1, order.order_id, True, said))
        engine.put(InstanceReport(at_ns=1, mode="push"))
        await asyncio.to_thread(
            await_snapshot, paths, lambda s: s.instances and s.instances[0].blockers == {}, "the instance"
        )
        async with operator(paths) as connection:
            answers = await collected(
                connection.act(Command(verb="drain", targets=["p"], force=True, wait=True, timeout_s=5))
            )

    outcome = outcome_of(list(answers))
    assert (outcome.state, outcome.message) == ("done", f"p: drained{told}")


def _drain(engine: Reporter, order: Order) -> None:
    engine.put(InstanceReport(at_ns=2, mode="push", draining=True))
    engine.put(OrderAnswer(2, order.order_id, True, "no new transfer starts"))


@pytest.mark.parametrize("p_took_it", [False, True])
async def test_what_d_expects_of_p_does_not_hold_up_a_switch_but_what_p_says_does(
    paths: RuntimePaths, p_took_it: bool
) -> None:
    """Where a router asks P and D at once, D registers for a push until P has told it to read: under load
    there is always such a registration, and it is no transfer in the old direction yet."""
    core = hello("p", process="engine-core", orders=list(ORDER_KINDS))
    other = hello("d", process="engine-core", pid=os.getppid(), role="decode")
    with running_agent(paths), contextlib.ExitStack() as reporters:
        p = reporters.enter_context(reporting(paths, start_agent=False, hello=core))
        d = reporters.enter_context(reporting(paths, start_agent=False, hello=other))
        p._on_order = lambda order: _switch(p, d, order, p_took_it=p_took_it)
        p.put(InstanceReport(at_ns=1, mode="push"))
        await asyncio.to_thread(
            await_snapshot, paths, lambda s: any(each.blockers == {} for each in s.instances), "the instances"
        )
        async with operator(paths) as connection:
            switch = Command(verb="mode", targets=["p"], arguments={"mode": "pull"}, wait=True, timeout_s=2)
            outcome = outcome_of(list(await collected(connection.act(switch))))

    if p_took_it:
        assert outcome.state == "timed-out"
        assert "1 live transfer still pushes" in outcome.message
    else:
        assert outcome.state == "done", outcome.message
        assert "none in the old direction is left" in outcome.message


def _switch(p: Reporter, d: Reporter, order: Order, *, p_took_it: bool) -> None:
    """Obey; a transfer that began after it pulls, and D has just registered for another."""
    now_ns = time.monotonic_ns()

    def event(side: Side, step: Stage, request: str, direction: Direction, after_ns: int) -> TransferEvent:
        own, peer = (
            (f"p-{request}", f"d-{request}") if side == "prefill" else (f"d-{request}", f"p-{request}")
        )
        return TransferEvent(
            at_ns=now_ns + after_ns,
            side=side,
            step=step,
            request_id=own,
            direction=direction,
            peer_request_id=peer,
            peer_engine_id="engine-of-d" if side == "prefill" else "engine-of-p",
        )

    if p_took_it:
        p.put(event("prefill", "queued", "late", "push", 2))
    d.put(event("decode", "registered", "late", "push", 3))
    p.put(event("prefill", "queued", "read", "pull", 1))
    d.put(event("decode", "done", "read", "pull", 5))
    p.put(InstanceReport(at_ns=now_ns, mode="pull"))
    p.put(OrderAnswer(now_ns, order.order_id, True))


async def test_an_answer_to_an_order_that_nobody_gave_is_let_be(paths: RuntimePaths) -> None:
    with running_agent(paths), reporting(paths, start_agent=False) as reporter:
        reporter.put(OrderAnswer(1, 5, True))
        reporter.put(InstanceReport(at_ns=2, mode="pull"))
        await asyncio.to_thread(
            await_snapshot,
            paths,
            lambda s: s.instances and s.instances[0].mode == "pull",
            "the report after it",
        )


def test_a_command_outlives_who_sent_it(paths: RuntimePaths) -> None:
    with acting_node(paths, "--rate", "20", "--failure-rate", "1", pairs=1) as node:
        await_snapshot(paths, lambda s: len(s.transfers) > 3, "transfers")
        command = Command(verb="drain", targets=["sim-prefill-0"], force=True, wait=True, timeout_s=20)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(paths.operate))
            client.sendall(client_hello() + encode_frame(command))
            wait_until(node.audit, "the command to begin")
        wait_until(lambda: node.audit()[-1].get("state") == "done", "its outcome in the record", timeout_s=30)

        assert node.audit()[0]["event"] == "started"
