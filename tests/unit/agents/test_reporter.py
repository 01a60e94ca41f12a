"""The engine's side: whatever the agent does, `put` returns at once and what was queued arrives in order."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvtop.agents.events import (
    ENGINE_BATCH,
    ENGINE_HELLO,
    EngineEvent,
    EngineHello,
    EngineStats,
    EngineStopping,
    InstanceReport,
    LatencySamples,
    OrderAnswer,
    TransferEvent,
)
from kvtop.agents.orders import CancelTransfer, EvictPeer, Order, SetDraining, SetMode
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import HEADER, MAX_INBOUND_FRAME_BYTES, WIRE_VERSION, Refusal, Welcome, encode_frame
from tests.support.agent import frame, hello, runtime_folder
from tests.support.waiting import wait_until


class Listener:
    """An agent's ingest socket, of which the test decides what it answers and when it goes."""

    def __init__(self, paths: RuntimePaths, *, refusing: bool = False) -> None:
        paths.prepare()
        paths.ingest.unlink(missing_ok=True)
        self.hellos: list[EngineHello] = []
        self.events: list[EngineEvent] = []
        self.dropped: list[int] = []
        self._refusing = refusing
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(paths.ingest))
        self._socket.listen()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Send bytes to the reporter that came last."""
        self._connections[-1].sendall(data)

    def close(self) -> None:
        """Go without a word, as a killed agent does."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._connections.append(connection)
            with contextlib.suppress(OSError, EOFError):
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        self.hellos.append(ENGINE_HELLO.decode(self._frame(connection)))
        if self._refusing:
            connection.sendall(encode_frame(Refusal(WIRE_VERSION, "a test", "not you")))
            return
        connection.sendall(encode_frame(Welcome(WIRE_VERSION, "a test", "node", 1, 1, "engine")))
        while True:
            batch = ENGINE_BATCH.decode(self._frame(connection))
            self.events += batch.events
            self.dropped.append(batch.dropped_events)

    def _frame(self, connection: socket.socket) -> bytes:
        (length,) = HEADER.unpack(self._exactly(connection, HEADER.size))
        if length > MAX_INBOUND_FRAME_BYTES:
            connection.close()  # as an agent does
            raise EOFError
        return self._exactly(connection, length)

    def _exactly(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


@contextlib.contextmanager
def listening(paths: RuntimePaths, *, refusing: bool = False) -> Iterator[Listener]:
    listener = Listener(paths, refusing=refusing)
    try:
        yield listener
    finally:
        listener.close()


def numbered(count: int, first: int = 0) -> list[EngineStats]:
    return [EngineStats(at_ns=n, running=n, waiting=0, kv_usage=0.0) for n in range(first, first + count)]


def test_events_arrive_all_and_in_order(paths: RuntimePaths) -> None:
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False)
        sent = numbered(2000)
        for event in sent:
            reporter.put(event)
        reporter.start()
        reporter.close(5)
        wait_until(lambda: len(listener.events) > 2000, "all events and the word that the process stops")

        assert listener.events[:-1] == sent
        assert isinstance(listener.events[-1], EngineStopping)
        assert [each.name for each in listener.hellos] == ["prefill-0"]


def test_what_is_queued_while_no_agent_listens_arrives_when_one_does(paths: RuntimePaths) -> None:
    reporter = Reporter(hello(), paths, start_agent=False)
    reporter.start()
    for event in numbered(50):
        reporter.put(event)
    assert not reporter.connected

    with listening(paths) as listener:
        wait_until(lambda: len(listener.events) == 50, "the queued events")
        reporter.close(5)

    assert listener.hellos[0].previous_agent_lost_ns is None


def test_after_a_loss_the_new_agent_is_told_since_when_it_lacks_events(paths: RuntimePaths) -> None:
    reporter = Reporter(hello(), paths, start_agent=False)
    with listening(paths):
        reporter.start()
        wait_until(lambda: reporter.connected, "the first connection")
        before_ns = time.monotonic_ns()
    wait_until(lambda: not reporter.connected, "the loss to be noticed")

    with listening(paths) as listener:
        wait_until(lambda: listener.hellos, "the second connection")
        reporter.close(5)

    lost_ns = listener.hellos[0].previous_agent_lost_ns
    assert lost_ns is not None
    assert before_ns <= lost_ns <= listener.hellos[0].clock.monotonic_ns


def test_a_full_ring_drops_the_newest_events_and_tells_how_many(paths: RuntimePaths) -> None:
    reporter = Reporter(hello(), paths, capacity=10, start_agent=False)
    for event in numbered(25):
        reporter.put(event)
    assert reporter.dropped_events == 15

    with listening(paths) as listener:
        reporter.start()
        wait_until(lambda: len(listener.events) == 10, "what the ring held")
        for event in numbered(1, first=99):
            reporter.put(event)
        wait_until(lambda: len(listener.events) == 11, "what came later")
        reporter.close(5)

    assert listener.events[:11] == [*numbered(10), *numbered(1, first=99)]
    assert listener.hellos[0].dropped_events == 15


def test_a_backlog_larger_than_a_frame_arrives_whole_and_in_order(paths: RuntimePaths) -> None:
    """256 decoding streams give 256 gaps a step: 512 steps are more than one frame may hold."""
    sent = [LatencySamples(n, [], [n * 1e-5] * 256) for n in range(600)]
    reporter = Reporter(hello(), paths, start_agent=False)
    for event in sent:
        reporter.put(event)

    with listening(paths) as listener:
        reporter.start()
        wait_until(lambda: len(listener.events) == 600, "the backlog")
        reporter.close(5)

    assert listener.events[:600] == sent
    assert reporter.dropped_events == 0
    assert len(listener.hellos) == 1


@pytest.mark.parametrize("facts", [{"error": "x" * (1 << 20)}, {"bytes": 1 << 70}, {"error": object()}])
def test_an_event_that_no_frame_can_hold_is_dropped_and_keeps_no_other_back(
    paths: RuntimePaths, facts: dict[str, Any]
) -> None:
    unsendable = TransferEvent(at_ns=1, side="prefill", request_id="r", step="failed", **facts)
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False)
        events: list[EngineEvent] = [*numbered(3), unsendable, *numbered(3, first=3)]
        for event in events:
            reporter.put(event)
        reporter.start()
        wait_until(lambda: listener.dropped[-1:] == [1], "the others, and the count")
        reporter.close(5)

    assert listener.events[:6] == numbered(6)
    assert reporter.dropped_events == 1


def test_a_quiet_process_says_that_it_lives(paths: RuntimePaths) -> None:
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False)
        reporter.start()
        wait_until(lambda: len(listener.dropped) >= 2, "two signs of life")
        reporter.close(5)


def test_an_agent_that_refuses_is_not_asked_again(
    paths: RuntimePaths, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(paths, refusing=True) as listener:
        reporter = Reporter(hello(), paths, start_agent=False)
        reporter.start()
        wait_until(lambda: "not you" in caplog.text, "the warning")
        reporter.put(numbered(1)[0])
        reporter.close(5)

    assert len(listener.hellos) == 1
    assert listener.events == []


def test_an_agent_that_cannot_be_started_is_tried_again_later_and_later(
    paths: RuntimePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    reporter = Reporter(hello(), paths, start_agent=True)
    reporter.start()
    wait_until(lambda: reporter._launch_pause_s >= 8, "two attempts", timeout_s=15)
    reporter.put(numbered(1)[0])
    reporter.close(5)

    assert not reporter.connected


@pytest.mark.parametrize("make_unusable", ["a file", "open to others"])
def test_a_runtime_folder_that_cannot_be_used_does_not_reach_the_engine(
    paths: RuntimePaths, make_unusable: str
) -> None:
    if make_unusable == "a file":
        paths.folder.write_text("")
    else:
        paths.folder.mkdir(mode=0o777)
    reporter = Reporter(hello(), paths)
    reporter.start()
    for event in numbered(10):
        reporter.put(event)
    reporter.close(5)

    assert not reporter.connected


ORDERS: list[Order] = [
    SetMode(1, "pull"),
    SetMode(2, "push", "engine-of-decode-0"),
    SetDraining(3, True),
    CancelTransfer(4, "decode", "cmpl-1"),
    EvictPeer(5, "engine-of-decode-0"),
]


def test_orders_come_at_once_and_in_order_and_so_do_their_answers(paths: RuntimePaths) -> None:
    def obey(order: Order) -> None:
        reporter.put(OrderAnswer(time.monotonic_ns(), order.order_id, True))

    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, flush_interval_s=20, on_order=obey)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        began_s = time.monotonic()
        listener.send(b"".join(encode_frame(order) for order in ORDERS))
        wait_until(lambda: len(listener.events) == 5, "all answers")
        took_s = time.monotonic() - began_s

    reporter.close(5)
    assert [each.order_id for each in listener.events if isinstance(each, OrderAnswer)] == [1, 2, 3, 4, 5]
    assert took_s < 5  # the ring alone would be emptied every 20 s only


def test_an_order_that_comes_in_pieces_is_taken_whole(paths: RuntimePaths) -> None:
    taken: list[Order] = []
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, on_order=taken.append)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        for byte in b"".join(encode_frame(order) for order in ORDERS):
            listener.send(bytes([byte]))
        wait_until(lambda: len(taken) == 5, "all orders")
        reporter.close(5)

    assert taken == ORDERS


@pytest.mark.parametrize(
    "wrong",
    [
        frame(b"\xc1"),
        frame(b""),
        frame(b"\x91" * 50_000),
        encode_frame(Refusal(WIRE_VERSION, "a test", "go away")),
        encode_frame(Welcome(WIRE_VERSION, "a test", "node", 1, 1, "engine")),
        frame(msgspec.msgpack.encode({"type": "set-mode", "order_id": -1, "mode": "push"})),
        frame(msgspec.msgpack.encode({"type": "set-mode", "order_id": 1, "mode": "sideways"})),
    ],
)
def test_what_is_no_order_does_not_end_reporting(paths: RuntimePaths, wrong: bytes) -> None:
    taken: list[Order] = []
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, on_order=taken.append)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        listener.send(wrong + encode_frame(SetDraining(7, True)))
        wait_until(lambda: taken, "the order after it")
        reporter.put(numbered(1)[0])
        wait_until(lambda: listener.events, "a report after it")
        reporter.close(5)

    assert taken == [SetDraining(7, True)]
    assert len(listener.hellos) == 1


def test_an_order_that_fails_does_not_end_reporting(
    paths: RuntimePaths, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(order: Order) -> None:
        raise RuntimeError("made by the test")

    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, on_order=fail)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        listener.send(encode_frame(SetDraining(7, True)))
        wait_until(lambda: "made by the test" in caplog.text, "the failure to be logged")
        reporter.put(numbered(1)[0])
        wait_until(lambda: listener.events, "a report after it")
        reporter.close(5)

    assert len(listener.hellos) == 1


def test_frames_that_are_out_of_step_are_put_right_by_another_connection(paths: RuntimePaths) -> None:
    taken: list[Order] = []
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, on_order=taken.append)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        listener.send(HEADER.pack(MAX_INBOUND_FRAME_BYTES + 1) + b"half of")
        wait_until(lambda: len(listener.hellos) == 2 and reporter.connected, "another connection")
        listener.send(encode_frame(SetDraining(7, True)))
        wait_until(lambda: taken, "an order")
        reporter.close(5)

    assert taken == [SetDraining(7, True)]


def test_an_idle_reporter_sleeps(paths: RuntimePaths) -> None:
    with listening(paths) as listener:
        reporter = Reporter(hello(), paths, start_agent=False, on_order=lambda _order: None)
        reporter.start()
        wait_until(lambda: reporter.connected, "the connection")
        before = resource.getrusage(resource.RUSAGE_SELF)
        heartbeats = len(listener.dropped) + 2
        wait_until(lambda: len(listener.dropped) >= heartbeats, "two heartbeats", poll_s=0.2)
        after = resource.getrusage(resource.RUSAGE_SELF)
        reporter.close(5)

    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_another_agent_is_told_what_holds_although_nothing_has_changed(paths: RuntimePaths) -> None:
    holds = InstanceReport(at_ns=2, mode="pull", draining=True)
    reporter = Reporter(hello(), paths, start_agent=False)
    for event in (InstanceReport(at_ns=1, mode="push"), holds):
        reporter.put(event)
    with listening(paths) as first:
        reporter.start()
        wait_until(lambda: len(first.events) == 2, "both reports")
    wait_until(lambda: not reporter.connected, "the loss to be noticed")

    with listening(paths) as second:
        wait_until(lambda: second.events, "the report again")
        reporter.close(5)

    assert second.events[0] == holds
