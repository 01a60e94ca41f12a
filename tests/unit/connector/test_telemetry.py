"""Telemetry fails open: nothing that goes wrong in it reaches the engine, and idle engines are not chatty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtop.agents.events import EngineStats, LatencySamples, TransferEvent
from kvtop.connector.config import Settings
from kvtop.connector.telemetry import Telemetry, hello_of, telemetry_for

pytestmark = pytest.mark.vllm


class Sink:
    """Takes events in the reporter's place; what a real one does with them is tested with the reporter."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[Any] = []
        self._error = error

    def put(self, event: object) -> None:
        if self._error:
            raise self._error
        self.events.append(event)

    def close(self) -> None:
        if self._error:
            raise self._error


def telemetry(sink: Sink) -> Telemetry:
    return Telemetry(sink)  # type: ignore[arg-type]


FIGURES = SimpleNamespace(totalBytes=100, descCount=2, postDuration=5, xferDuration=50)
REPORTS = {
    "step": lambda t: t.step("prefill", "r", "queued", "push"),
    "done": lambda t: t.done("prefill", "r", "push", rank=0, ranks_expected=1, figures=[FIGURES]),
    "latency": lambda t: t.latency([0.1], []),
    "load": lambda t: t.load(1, 2, 0.5),
    "close": lambda t: t.close(),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_reporter_that_fails_is_counted_and_not_felt(report: str) -> None:
    broken = telemetry(Sink(RuntimeError("broken")))
    REPORTS[report](broken)
    assert broken.errors == 1


def test_arguments_that_are_not_what_they_should_be_are_counted_and_not_felt() -> None:
    odd: Any = telemetry(Sink())
    odd.step("prefill", "r", "queued", "push", lease_s="soon")
    odd.done("prefill", "r", "push", rank=0, ranks_expected=1, figures=[object()])
    odd.latency(None, 3)
    odd.load(1, 2, "full")
    assert odd.errors == 4


@pytest.mark.parametrize("report", REPORTS)
def test_an_instance_that_does_not_report_reports_nothing(report: str) -> None:
    silent = Telemetry(None)
    REPORTS[report](silent)
    assert silent.errors == 0


def test_a_configuration_that_cannot_be_read_leaves_the_engine_without_telemetry_and_alive() -> None:
    nothing: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="odd"))
    deaf = telemetry_for(nothing, Settings())
    deaf.latency([0.1], [])
    assert deaf.errors == 0


def test_a_completion_sums_its_handles_and_takes_the_slowest() -> None:
    sink = Sink()
    other = SimpleNamespace(totalBytes=50, descCount=1, postDuration=9, xferDuration=20)
    telemetry(sink).done("decode", "r", "pull", rank=1, ranks_expected=2, figures=[FIGURES, other])

    (event,) = sink.events
    assert isinstance(event, TransferEvent)
    assert (event.step, event.side, event.rank, event.ranks_expected) == ("done", "decode", 1, 2)
    assert (event.bytes, event.descriptors, event.post_us, event.wire_us) == (150, 3, 9.0, 50.0)


def test_an_engine_that_steps_without_change_repeats_nothing() -> None:
    """An engine that waits for a transfer steps hundreds of times a second."""
    sink = Sink()
    busy = telemetry(sink)
    for kv_usage in (0.5, 0.5, 0.501, 0.502, 0.52, 0.0, 0.0):
        busy.load(1, 0, kv_usage)
        busy.latency([], [])
    busy.load(0, 0, 0.0)

    assert [(each.running, each.kv_usage) for each in sink.events] == [
        (1, 0.5),
        (1, 0.52),
        (1, 0.0),
        (0, 0.0),
    ]
    assert all(isinstance(each, EngineStats) for each in sink.events)


def test_samples_are_passed_on_as_they_are() -> None:
    sink = Sink()
    ttft, itl = [0.1], [0.01, 0.02]
    telemetry(sink).latency(ttft, itl)
    ttft.clear()

    (event,) = sink.events
    assert isinstance(event, LatencySamples)
    assert (event.ttft_s, event.itl_s) == ([0.1], [0.01, 0.02])


def instance(*, dp_size: int, dp_index: int, engine_id: str) -> Any:
    """The parts of a vLLM configuration that say who an instance is."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id, kv_role="kv_producer"),
        parallel_config=SimpleNamespace(
            rank=0, data_parallel_size=dp_size, data_parallel_index=dp_index, tensor_parallel_size=1
        ),
        model_config=SimpleNamespace(served_model_name=["tiny"], model="/models/tiny"),
    )


def test_the_processes_of_one_instance_say_the_same_of_themselves() -> None:
    core = hello_of(instance(dp_size=1, dp_index=0, engine_id="e"), Settings(), "engine-core", None)
    server = hello_of(instance(dp_size=1, dp_index=0, engine_id="e"), Settings(), "api-server", 0)

    assert (core.engine_id, core.name, core.role, core.model) == ("e", "prefill-5600", "prefill", "tiny")
    assert (server.engine_id, server.name) == (core.engine_id, core.name)


def test_data_parallel_engines_are_instances_of_their_own() -> None:
    """vLLM appends the index to the engine id in the engine core, and not in the API server."""
    named = Settings(name="prefill-0")
    core = hello_of(instance(dp_size=2, dp_index=1, engine_id="e_dp1"), named, "engine-core", None)
    servers = [
        hello_of(instance(dp_size=2, dp_index=0, engine_id="e"), named, "api-server", i) for i in (0, 1)
    ]

    assert (core.engine_id, core.name) == ("e_dp1", "prefill-0-dp1")
    assert [(each.engine_id, each.name) for each in servers] == [
        ("e_dp0", "prefill-0-dp0"),
        ("e_dp1", "prefill-0-dp1"),
    ]
