"""Simulated engines look to the agent as kvtop's connector does, and never pass for real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvtop.agents.events import Direction, EngineEvent, EngineHello, TransferEvent
from kvtop.agents.model import Instance, Snapshot, Transfer
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.simulate import Simulation
from tests.support.agent import await_snapshot, running_agent, runtime_folder
from tests.support.waiting import wait_until

SIMULATE = [sys.executable, "-m", "kvtop.agents.simulate"]
P_QUEUED = ("prefill", "queued", "blocks lease_deadline_ns")
D_QUEUED = ("decode", "queued", "peer_engine_id peer_request_id")
D_ALLOCATED = ("decode", "allocated", "peer_engine_id peer_request_id")
FIGURES = "bytes descriptors post_us ranks_expected wire_us"
REPORTED_BY_THE_CONNECTOR = {
    "push": [
        P_QUEUED,
        D_QUEUED,
        D_ALLOCATED,
        ("decode", "registered", ""),
        ("prefill", "matched", "peer_engine_id peer_request_id ranks_expected"),
        ("prefill", "posting", "ranks_expected"),
        ("prefill", "on_wire", "ranks_expected"),
        ("prefill", "done", FIGURES),
        ("prefill", "released", ""),
        ("decode", "received", ""),
    ],
    "pull": [
        P_QUEUED,
        D_QUEUED,
        D_ALLOCATED,
        ("decode", "matched", "ranks_expected"),
        ("decode", "posting", "ranks_expected"),
        ("decode", "on_wire", "ranks_expected"),
        ("decode", "done", FIGURES),
        ("prefill", "released", ""),
        ("decode", "received", ""),
    ],
}
"""Side, step and the facts beside them, in order, as kvtop's connector reports them."""


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


class Recorder:
    """Stands where a `Reporter` does, and keeps what it is given."""

    def __init__(self, hello: EngineHello, _paths: RuntimePaths, heard: list[EngineEvent]) -> None:
        self.hello, self._heard = hello, heard

    def start(self) -> None: ...

    def put(self, event: EngineEvent) -> None:
        self._heard.append(event)

    def close(self) -> None: ...


def courses(
    monkeypatch: pytest.MonkeyPatch, mode: Direction, *, until_done: int = 30, seed: int = 1
) -> list[list[TransferEvent]]:
    """Each transfer's events in the order in which they were reported, transfers in order of arrival."""
    heard: list[EngineEvent] = []
    monkeypatch.setattr(
        "kvtop.agents.simulated_engine.Reporter",
        lambda hello, paths, on_order: Recorder(hello, paths, heard),
    )
    simulation = Simulation(
        RuntimePaths.at(Path("/unused")), rate_per_s=200, mode=mode, failure_rate=0, seed=seed
    )
    stop = threading.Event()
    thread = threading.Thread(target=simulation.run, args=(stop,))
    thread.start()

    def by_request() -> list[list[TransferEvent]]:
        found: dict[str, list[TransferEvent]] = defaultdict(list)
        for event in heard[:]:
            if isinstance(event, TransferEvent):
                found[event.request_id.rpartition("-")[0]].append(event)
        return list(found.values())

    def complete() -> list[list[TransferEvent]]:
        return [events for events in by_request() if events[-1].step == "received"]

    try:
        wait_until(lambda: len(complete()) >= until_done, f"{until_done} transfers", timeout_s=30)
    finally:
        stop.set()
        thread.join(10)
    return complete()


def shape(event: TransferEvent) -> tuple[str, str, str]:
    """Which side reports which step with which facts."""
    always = {"at_ns", "side", "request_id", "step", "direction"}
    facts = {name for name, value in msgspec.structs.asdict(event).items() if value is not None}
    return event.side, event.step, " ".join(sorted(facts - always - {"rank"}))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_reports_are_those_of_the_connector_in_its_order(
    monkeypatch: pytest.MonkeyPatch, mode: Direction
) -> None:
    for events in courses(monkeypatch, mode):
        reported = [shape(event) for event in events if event.step != "handshaking"]

        assert reported == REPORTED_BY_THE_CONNECTOR[mode]
        assert {event.direction for event in events} == {mode}


@contextmanager
def simulating(paths: RuntimePaths, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A simulation of the user's, which reports to the agent in `paths`."""
    environment = {**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
    process = subprocess.Popen([*SIMULATE, *options], env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_both_sides_become_one_whole_row_that_is_marked_as_simulated(
    paths: RuntimePaths, mode: Direction
) -> None:
    with running_agent(paths), simulating(paths, "--rate", "30", "--failure-rate", "0", "--mode", mode):
        seen = await_snapshot(
            paths,
            lambda s: s.node.transfers_done >= 10 and all(each.state == "serving" for each in s.instances),
            "ten transfers",
        )

    done = [row for row in seen.transfers if row.stage == "done"]
    assert [each.name for each in seen.instances] == ["sim-prefill-0", "sim-decode-0"]
    assert all(each.simulated and each.dropped_events == 0 and not each.gaps for each in seen.instances)
    assert all(row.simulated for row in seen.transfers)
    for row in done:
        assert row.prefill is not None
        assert row.decode is not None
        assert (row.prefill.name, row.decode.name, row.direction) == ("sim-prefill-0", "sim-decode-0", mode)
        assert row.bytes == (row.blocks or 0) * (2 << 20)
        assert None not in (row.descriptors, row.post_us, row.wire_us, row.lease_deadline_ns)
        assert ("registered" in row.times_ns) == (mode == "push")


def test_what_is_on_the_wire_when_it_is_cancelled_stays_in_quarantine_until_it_has_ended(
    paths: RuntimePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtop.agents.simulated_request.WIRE_BYTES_PER_S", (2e7, 4e7))
    stop = threading.Event()
    environment = {**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
    with running_agent(paths):
        simulation = Simulation(paths, rate_per_s=5, failure_rate=0, seed=1)
        thread = threading.Thread(target=simulation.run, args=(stop,))
        thread.start()
        try:
            seen = await_snapshot(
                paths,
                lambda s: [row for row in s.transfers if row.stage == "on_wire"],
                "a transfer on the wire",
            )
            row = [row for row in seen.transfers if row.stage == "on_wire"][-1]
            cancelled = subprocess.run(
                [sys.executable, "-m", "kvtop.agents.cli", "cancel", str(row.id)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            kept = await_snapshot(
                paths, lambda s: _stage_of(s.transfers, row.id) == "quarantined", "quarantine"
            )
            ended = await_snapshot(
                paths,
                lambda s: (
                    _stage_of(s.transfers, row.id) == "cancelled" and _decode(s).quarantined_blocks == 0
                ),
                "its end",
            )
        finally:
            stop.set()
            thread.join(20)

    assert _decode(kept).quarantined_blocks == row.blocks
    assert (_decode(kept).quarantined_since_ns or 0) > row.first_seen_ns
    assert _decode(ended).quarantined_since_ns is None
    assert "its blocks stay in quarantine" in cancelled.stdout
    assert "cannot be undone: what is on the wire cannot be stopped" in cancelled.stderr


def _decode(seen: Snapshot) -> Instance:
    return next(each for each in seen.instances if each.role == "decode")


def _stage_of(rows: list[Transfer], row_id: int) -> str:
    return next(row.stage for row in rows if row.id == row_id)


def test_failures_are_of_every_kind_and_each_comes_where_it_can(paths: RuntimePaths) -> None:
    def ended(rows: list[Transfer], error_class: str) -> list[Transfer]:
        return [row for row in rows if row.error_class == error_class]

    with running_agent(paths), simulating(paths, "--rate", "30", "--failure-rate", "1", "--seed", "3"):
        seen = await_snapshot(
            paths,
            lambda s: (
                all(ended(s.transfers, each) for each in ("handshake", "transport", "expiry"))
                and [each for each in s.instances[0].pairs if each.state == "failed"]
            ),
            "a failure of each kind, and a pair that failed",
        )

    rows, (pair,) = seen.transfers, seen.instances[0].pairs
    assert (pair.engine_id, pair.reason) == (seen.instances[1].engine_id, "simulated: the handshake failed")
    assert seen.node.transfers_done == 0
    assert all((row.error or "").startswith("simulated: ") for row in rows if row.error_class)
    assert all("handshaking" in row.times_ns for row in ended(rows, "handshake"))
    assert all("on_wire" in row.times_ns for row in ended(rows, "transport"))
    for row in ended(rows, "expiry"):
        assert row.stage == "expired"
        assert row.lease_deadline_ns is not None
        assert row.times_ns["expired"] >= row.lease_deadline_ns


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_told_to_end_detaches_in_order(paths: RuntimePaths, number: signal.Signals) -> None:
    with running_agent(paths):
        with simulating(paths) as process:
            await_snapshot(paths, lambda s: len(s.instances) == 2, "both engines")
            process.send_signal(number)
            assert process.wait(20) == 0

        seen = await_snapshot(
            paths, lambda s: {each.state for each in s.instances} == {"stopped"}, "both to have stopped"
        )

    assert {each.state_reason for each in seen.instances} == {"shut down in order"}


def test_it_ends_by_itself_after_its_duration(paths: RuntimePaths) -> None:
    with running_agent(paths), simulating(paths, "--duration", "0.2") as process:
        assert process.wait(20) == 0


def test_a_seed_repeats_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def requests(seed: int) -> dict[str, int | None]:
        return {events[0].request_id: events[0].blocks for events in courses(monkeypatch, "push", seed=seed)}

    first, again, other = requests(1), requests(1), requests(2)

    both = first.keys() & again.keys()
    assert both
    assert {each: first[each] for each in both} == {each: again[each] for each in both}
    assert not first.keys() & other.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--rate", "many"),
        ("--pairs", "0"),
        ("--pairs", "1.5"),
        ("--failure-rate", "2"),
        ("--duration", "-1"),
        ("--mode", "sideways"),
    ],
)
def test_an_impossible_option_is_named_before_anything_starts(
    paths: RuntimePaths, wrong: tuple[str, str]
) -> None:
    environment = {**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
    ended = subprocess.run(
        [*SIMULATE, *wrong], env=environment, capture_output=True, text=True, timeout=30, check=False
    )

    assert ended.returncode == 2
    assert f"argument {wrong[0]}: " in ended.stderr
    assert f"'{wrong[1]}'" in ended.stderr
    assert not paths.folder.exists()


def test_a_runtime_folder_that_cannot_be_used_is_named(paths: RuntimePaths) -> None:
    paths.folder.write_text("")
    environment = {**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
    ended = subprocess.run(SIMULATE, env=environment, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"Error: the runtime folder {paths.folder} ")
    assert "KVTOP_RUNTIME_DIR" in ended.stderr
    assert ended.stderr.count("\n") == 1
