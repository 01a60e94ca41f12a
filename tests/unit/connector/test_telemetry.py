"""Telemetry fails open: nothing that goes wrong in it reaches the engine, and idle engines are not chatty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtop.agents.events import EngineStats, LatencySamples, TransferEvent
from kvtop.connector.config import Settings
from kvtop.connector.telemetry import Telemetry, telemetry_for

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
