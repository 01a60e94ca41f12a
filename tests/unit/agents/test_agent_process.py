"""A real agent process: what engines and consoles may do to it, and what it must survive."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.agents.events import (
    Batch,
    EngineStats,
    InstanceReport,
    OrderAnswer,
    PairReport,
    TransferEvent,
)
from kvtop.agents.model import AGENT_MESSAGE
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import HEADER, MAX_INBOUND_FRAME_BYTES, WIRE_VERSION, Refusal, encode_frame
from tests.support.agent import (
    agent_log,
    agent_pid,
    await_snapshot,
    client_hello,
    frame,
    hello,
    reporting,
    running_agent,
    runtime_folder,
    send_raw,
    snapshot,
)
from tests.support.waiting import wait_until


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def busy_paths() -> Iterator[RuntimePaths]:
    """An agent that lives through all the wrong things that a module's tests send."""
    with runtime_folder() as folder, running_agent(folder) as process:
        yield folder
        assert process.poll() is None, "the agent died of what it was sent"
        log = agent_log(folder)
        assert "a bug in kvtop" not in log, log[log.index("a bug in kvtop") :][:4000]


def step(number: int, name: Any = "queued", **facts: Any) -> TransferEvent:
    return TransferEvent(at_ns=number, side="prefill", request_id=f"request-{number}", step=name, **facts)


def refusal_in(answer: bytes) -> Refusal:
    """The refusal that ends what an agent sent."""
    bodies = []
    while answer:
        (length,) = HEADER.unpack(answer[: HEADER.size])
        bodies.append(answer[HEADER.size : HEADER.size + length])
        answer = answer[HEADER.size + length :]
    last = AGENT_MESSAGE.decode(bodies[-1])
    assert isinstance(last, Refusal)
    return last


def test_what_an_engine_reports_is_what_a_console_sees(paths: RuntimePaths) -> None:
    with running_agent(paths), reporting(paths, start_agent=False) as reporter:
        for number in range(3):
            reporter.put(step(number))
        reporter.put(EngineStats(at_ns=9, running=4, waiting=2, kv_usage=0.25))

        seen = await_snapshot(paths, lambda s: len(s.transfers) == 3, "three transfers")

        (instance,) = seen.instances
        assert (instance.name, instance.state, instance.pids) == ("prefill-0", "serving", [os.getpid()])
        assert (instance.running, instance.waiting, instance.kv_usage) == (4, 2, 0.25)
        assert instance.stage_depths == {"queued": 3}
        assert instance.gaps == []


def test_an_engine_that_shuts_down_in_order_is_shown_as_stopped(paths: RuntimePaths) -> None:
    with running_agent(paths):
        with reporting(paths, start_agent=False) as reporter:
            reporter.put(step(1))
            await_snapshot(paths, lambda s: s.transfers, "the transfer")

        seen = await_snapshot(paths, lambda s: s.instances[0].state == "stopped", "the instance to stop")

        assert seen.instances[0].state_reason == "shut down in order"
        assert [(each.stage, each.error_class) for each in seen.transfers] == [("failed", "transport")]


def test_an_engine_that_dies_is_shown_as_down_and_its_transfers_as_failed(
    paths: RuntimePaths,
) -> None:
    reporting_process = (
        "import sys, time; from tests.support.agent import *; from kvtop.agents.events import *\n"
        "paths = RuntimePaths.default()\n"
        "with reporting(paths, start_agent=False) as reporter:\n"
        "    reporter.put(TransferEvent(at_ns=1, side='prefill', request_id='r', step='queued'))\n"
        "    sys.stdin.read()\n"
    )
    with running_agent(paths):
        engine = subprocess.Popen(
            [sys.executable, "-c", reporting_process],
            stdin=subprocess.PIPE,
            env={**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)},
        )
        await_snapshot(paths, lambda s: s.transfers, "the transfer")
        engine.kill()
        engine.communicate()

        seen = await_snapshot(paths, lambda s: s.instances[0].state == "down", "the instance to be down")

    how = seen.instances[0].state_reason.partition(f"(pid {engine.pid}) ")[2]
    assert how in ("was killed by SIGKILL", "ended without a word")  # an older kernel may not know
    assert [(each.stage, each.error_class) for each in seen.transfers] == [("failed", "transport")]


def test_the_folder_and_its_sockets_are_private(paths: RuntimePaths) -> None:
    def modes() -> dict[str, int]:
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths.folder.glob("*.sock")}

    private = {"ingest.sock": 0o600, "operate.sock": 0o600, "view.sock": 0o660}
    with running_agent(paths):
        wait_until(lambda: modes() == private, f"the modes {private}")  # they are set after a socket appears
        assert stat.S_IMODE(paths.folder.stat().st_mode) == 0o700


def test_an_agent_that_is_told_to_end_leaves_no_socket(paths: RuntimePaths) -> None:
    with running_agent(paths) as process:
        process.terminate()
        assert process.wait(10) == 0

    assert list(paths.folder.glob("*.sock")) == []


def test_a_second_agent_says_who_serves_and_leaves(paths: RuntimePaths) -> None:
    with running_agent(paths) as first:
        second = subprocess.run(
            [sys.executable, "-m", "kvtop.agents.cli", "--runtime-dir", str(paths.folder), "run"],
            capture_output=True,
            text=True,
            check=True,
        )

        assert second.stderr == f"an agent serves {paths.folder} already (pid {first.pid})\n"
        assert snapshot(paths).node.agent_pid == first.pid


def test_an_agent_that_crashed_leaves_nothing_that_keeps_the_next_from_serving(paths: RuntimePaths) -> None:
    with running_agent(paths) as first:
        first.kill()
        first.wait(10)
        assert paths.view.exists()
        paths.view.unlink()
        paths.operate.unlink()

    with running_agent(paths) as second:
        assert snapshot(paths).node.agent_pid == second.pid


def test_an_agent_without_engines_and_consoles_ends_by_itself(paths: RuntimePaths) -> None:
    with running_agent(paths, "--exit-when-idle", "1") as process:
        assert process.wait(15) == 0


def test_an_agent_whose_folder_is_removed_ends_by_itself(paths: RuntimePaths) -> None:
    """Else each test, demo or pod that cleans up behind itself would leave an agent that nobody can reach."""
    with running_agent(paths) as process:
        shutil.rmtree(paths.folder)
        assert process.wait(15) == 0


@pytest.mark.parametrize("version", [0, 2, 10**6, -1])
def test_another_wire_version_is_refused_with_both_versions_and_what_to_do(
    busy_paths: RuntimePaths, version: int
) -> None:
    refusal = refusal_in(send_raw(busy_paths.view, client_hello(version)))

    assert f"speaks wire version {version}, this side speaks {WIRE_VERSION}" in refusal.reason
    assert "install the same kvtop version" in refusal.reason


@pytest.mark.parametrize("socket", ["ingest", "view", "operate"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (frame(b"\xc1 no msgpack"), "cannot be decoded"),
        (frame(b""), "cannot be decoded"),
        (frame(msgspec.msgpack.encode([1, 2, 3])), "cannot be decoded"),
        (frame(msgspec.msgpack.encode({"wire_version": "one"})), "cannot be decoded"),
        (frame(b"\x91" * 100_000), "cannot be decoded"),
        (HEADER.pack(MAX_INBOUND_FRAME_BYTES + 1), "was announced, the limit is"),
        (HEADER.pack(0xFFFFFFFF), "was announced, the limit is"),
        (HEADER.pack(100) + b"short", "ended after 5 of a frame's 100 bytes"),
        (b"\x00\x00", "ended inside a frame's header"),
    ],
)
def test_a_wrong_frame_closes_its_connection_with_the_reason_and_is_counted(
    busy_paths: RuntimePaths, socket: str, wrong: bytes, said: str
) -> None:
    before = snapshot(busy_paths).node.rejected_frames

    refusal = refusal_in(send_raw(getattr(busy_paths, socket), wrong))

    assert said in refusal.reason
    assert snapshot(busy_paths).node.rejected_frames == before + 1


def test_a_wrong_frame_after_a_right_hello_is_treated_alike(busy_paths: RuntimePaths) -> None:
    engine = encode_frame(hello("after-hello"))
    for socket, opening in ((busy_paths.ingest, engine), (busy_paths.view, client_hello())):
        assert "cannot be decoded" in refusal_in(send_raw(socket, opening, frame(b"\xc1"))).reason


@pytest.mark.parametrize(
    "facts", [{"pid": 0}, {"pid": -1}, {"pid": 1 << 31}, {"dropped_events": -1}, {"dropped_events": 1 << 63}]
)
def test_what_no_engine_can_say_of_itself_is_refused_before_a_console_sees_it(
    busy_paths: RuntimePaths, facts: dict[str, int]
) -> None:
    answer = send_raw(busy_paths.ingest, encode_frame(hello("impossible", **facts)))

    assert "cannot be decoded" in refusal_in(answer).reason
    assert "impossible" not in {each.name for each in snapshot(busy_paths).instances}


def test_a_client_may_not_pose_as_an_engine_or_the_reverse(busy_paths: RuntimePaths) -> None:
    assert "cannot be decoded" in refusal_in(send_raw(busy_paths.ingest, client_hello())).reason
    assert "cannot be decoded" in refusal_in(send_raw(busy_paths.view, encode_frame(hello()))).reason


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["ingest", "view", "operate"]),
    st.booleans(),
    st.lists(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(frame)), max_size=4),
)
def test_no_bytes_kill_the_agent(
    busy_paths: RuntimePaths, socket: str, after_hello: bool, parts: list[bytes]
) -> None:
    opening = encode_frame(hello("fuzz")) if socket == "ingest" else client_hello()

    send_raw(getattr(busy_paths, socket), *([opening] if after_hello else []), *parts)

    assert agent_pid(busy_paths) is not None


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_well_formed_event_kills_the_agent(busy_paths: RuntimePaths, data: st.DataObject) -> None:
    events = data.draw(
        st.lists(
            st.builds(
                InstanceReport,
                at_ns=st.integers(-(2**63), 2**63 - 1),
                mode=st.sampled_from(["push", "pull"]),
                draining=st.booleans(),
                blockers=st.dictionaries(
                    st.sampled_from(["writes", "reads", "leases", "registrations", "quarantine"]),
                    st.integers(-(2**63), 2**63 - 1),
                ),
                quarantined_since_ns=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
                pairs=st.lists(
                    st.builds(PairReport, st.text(), st.just("ready"), st.integers(-(2**63), 2**63 - 1))
                ),
            )
            | st.builds(OrderAnswer, st.integers(-5, 5), st.integers(0, 2**53 - 1), st.booleans(), st.text())
            | st.builds(
                TransferEvent,
                at_ns=st.integers(-(2**63), 2**63 - 1),
                side=st.sampled_from(["prefill", "decode"]),
                request_id=st.sampled_from(["a", "b", "", "a-00000000"]),
                step=st.sampled_from(
                    ["queued", "matched", "done", "failed", "expired", "received", "released", "skipped"]
                ),
                rank=st.integers(-1, 3),
                direction=st.sampled_from([None, "push", "pull"]),
                peer_request_id=st.sampled_from([None, "a", "b", ""]),
                peer_engine_id=st.sampled_from([None, "engine-of-odd", "x", ""]),
                bytes=st.one_of(st.none(), st.integers(-(2**62), 2**62)),
                ranks_expected=st.one_of(st.none(), st.integers(-3, 9)),
            ),
            max_size=20,
        )
    )

    send_raw(busy_paths.ingest, encode_frame(hello("odd")), encode_frame(Batch([*events])))

    assert snapshot(busy_paths).node.agent_pid == agent_pid(busy_paths)


def test_a_killed_agent_is_replaced_and_the_gap_is_shown_as_a_gap(paths: RuntimePaths) -> None:
    with reporting(paths) as reporter:
        reporter.put(step(1))
        first = await_snapshot(paths, lambda s: s.transfers, "the first transfer").node.agent_pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not reporter.connected, "the loss to be noticed")
        for number in range(2, 50):
            reporter.put(step(number))

        seen = await_snapshot(paths, lambda s: len(s.transfers) == 48, "the ledger to go on")

        (instance,) = seen.instances
        (gap,) = instance.gaps
        assert seen.node.agent_pid != first
        assert gap.reason == "no agent took its reports"
        assert gap.from_ns < gap.to_ns
        assert instance.dropped_events == 0


def test_a_stopped_agent_costs_the_engine_nothing_but_dropped_events_which_are_counted(
    paths: RuntimePaths,
) -> None:
    with running_agent(paths) as agent, reporting(paths, start_agent=False, capacity=100) as reporter:
        await_snapshot(paths, lambda s: s.instances, "the instance")
        agent.send_signal(signal.SIGSTOP)
        big = "x" * 100_000

        def overflowing() -> int:
            for _ in range(20):
                reporter.put(step(1, error=big))
            return reporter.dropped_events

        wait_until(overflowing, "the ring to overflow", timeout_s=30)
        agent.send_signal(signal.SIGCONT)

        seen = await_snapshot(
            paths,
            lambda s: s.instances[0].dropped_events == reporter.dropped_events,
            "the drops to be known",
        )

        assert any(gap.dropped_events for gap in seen.instances[0].gaps)
