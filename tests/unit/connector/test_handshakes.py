"""Peers that do not answer hold up nobody, and a handshake that fails leaves nothing behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvtop.connector.handshakes import Greeters, ShakingHands, ask
from kvtop.connector.upstream import NixlPushConnectorScheduler
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections, as a stopped process's does, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        yield int(server.getsockname()[1])


@contextmanager
def _listening(port: int) -> Iterator[None]:
    """Upstream's own listener of an engine with one rank."""
    ready, stop = threading.Event(), threading.Event()
    arguments = ({(0, 0): b"metadata"}, ready, stop, "127.0.0.1", port)
    listener = threading.Thread(target=NixlPushConnectorScheduler._nixl_handshake_listener, args=arguments)
    listener.start()
    ready.wait()
    yield
    stop.set()
    listener.join()


@pytest.fixture
def engine() -> Iterator[int]:
    port = _free_port()
    with _listening(port):
        yield port


def test_an_engine_that_answers_is_known_at_once(engine: int) -> None:
    for host in ("127.0.0.1", "localhost"):
        ask(host, engine, [(0, 0)])


def test_a_peer_that_hangs_is_told_from_one_that_is_not_there(silent: int) -> None:
    with pytest.raises(zmq.Again):
        ask("127.0.0.1", silent, [(0, 0)], timeout_s=0.2)
    with pytest.raises(ConnectionRefusedError):
        ask("127.0.0.1", _free_port(), [(0, 0)])
    with pytest.raises(OSError, match=r"Name|name|resolution|service"):
        ask("no-such-host.invalid", 1, [(0, 0)])


def test_a_listener_between_two_lives_is_waited_for() -> None:
    port = _free_port()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, "127.0.0.1", port, [(0, 0)])
        wait_until(asked.running, "the question to be under way")
        with _listening(port):
            asked.result()


def test_peers_that_hang_do_not_hold_up_a_first_meeting(engine: int, silent: int) -> None:
    greeters = Greeters()
    hanging = [greeters.submit(ask, "127.0.0.1", silent, [(0, 0)], 1.0) for _ in range(20)]
    started = time.monotonic()
    greeters.submit(ask, "127.0.0.1", engine, [(0, 0)]).result()
    took = time.monotonic() - started
    assert not any(each.done() for each in hanging), "they were to be waited for still"
    assert took < 1.0
    assert {type(each.exception()) for each in hanging} == {zmq.Again}
    greeters.shutdown()


def test_what_finds_no_thread_in_time_fails_instead_of_waiting_behind_all_others(silent: int) -> None:
    greeters = Greeters(threads=2, patience_s=0.2)
    started = time.monotonic()
    hanging = [greeters.submit(ask, "127.0.0.1", silent, [(0, 0)], 0.5) for _ in range(50)]
    failures = [type(each.exception()) for each in hanging]
    assert failures == [zmq.Again] * 2 + [TimeoutError] * 48
    assert time.monotonic() - started < 2.0
    greeters.shutdown()


def test_what_has_not_begun_never_does_once_the_engine_ends(silent: int) -> None:
    greeters = Greeters(threads=1)
    under_way, waiting = (greeters.submit(ask, "127.0.0.1", silent, [(0, 0)], 0.5) for _ in range(2))
    wait_until(under_way.running, "the first to begin")
    greeters.shutdown(wait=False)
    assert waiting.cancelled()


class Upstream:
    """What upstream's worker notes in a handshake, and how that fails: the second rank does not exist."""

    engine_id = "own"

    def __init__(self) -> None:
        self.released: list[int] = []
        self._remote_agents: dict[str, Any] = {}
        self._handshake_initiation_executor = ThreadPoolExecutor(1)
        self.transfer_topo = SimpleNamespace(
            handshake_target_ranks=lambda tp_size, _dcp_size: range(tp_size),
            unregister_remote_engine=lambda engine_id: self.sizes.pop(engine_id, None),
        )
        self.nixl_wrapper = SimpleNamespace(release_dlist_handle=self.released.append)
        self.sizes: dict[str, int] = {"own": 1}
        self.dst_xfer_side_handles: dict[str, dict[int, int]] = {}
        self.dst_num_blocks: dict[str, int] = {"own": 100}
        tables = "kv_caches_base_addr dst_region_num_blocks dst_region_group_ids"
        for name in f"{tables} dst_uses_region_group_mapping dst_region_mem_types tp_mappings".split():
            setattr(self, name, {"own": 1})

    def _nixl_handshake(self, host: str, port: int, tp_size: int, engine_id: str, *_: Any) -> str:
        self.sizes.setdefault(engine_id, tp_size)
        self.dst_num_blocks[engine_id] = 7
        self.dst_xfer_side_handles[engine_id] = {0: 70}
        if tp_size > 1:
            raise zmq.Again
        return threading.current_thread().name


class Worker(ShakingHands, Upstream):
    pass


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    with ThreadPoolExecutor(1, thread_name_prefix="nixl") as nixl_thread:
        worker.shake_hands_on(nixl_thread)
        yield worker
        worker._handshake_initiation_executor.shutdown()


def _shake(worker: Worker, *arguments: Any) -> Any:
    return worker._handshake_initiation_executor.submit(worker._nixl_handshake, *arguments).result()


def test_peers_are_met_on_the_one_thread_that_nixl_is_told_of_them(worker: Worker, engine: int) -> None:
    assert _shake(worker, "127.0.0.1", engine, 1, "peer").startswith("nixl")


def test_who_does_not_answer_is_not_met_at_all(worker: Worker) -> None:
    with pytest.raises(ConnectionRefusedError):
        _shake(worker, "127.0.0.1", _free_port(), 1, "peer")
    assert worker.sizes == {"own": 1}


@pytest.mark.parametrize("size", [0, -1, 10**12])
def test_a_peer_of_an_impossible_size_is_not_even_asked(worker: Worker, size: int) -> None:
    """Upstream would make a list of that many ranks."""
    for sizes in ((size, 1, 1), (1, size, 1), (1, 1, size)):
        with pytest.raises(ValueError, match="no peer has these"):
            worker._nixl_handshake("127.0.0.1", 1, sizes[0], "peer", *sizes[1:])


def test_a_handshake_that_fails_half_way_leaves_nothing_behind(
    worker: Worker, engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream would keep the size that the request named, and use it when the peer is met again."""
    monkeypatch.setattr("kvtop.connector.handshakes.ask", lambda *_: None)
    with pytest.raises(zmq.Again):
        _shake(worker, "127.0.0.1", engine, 2, "peer")
    assert worker.sizes == {"own": 1}
    assert worker.dst_num_blocks == {"own": 100}
    assert worker.released == [70]

    _shake(worker, "127.0.0.1", engine, 1, "peer")
    assert worker.sizes["peer"] == 1


def test_what_is_known_of_the_engine_itself_and_of_ready_peers_is_kept(
    worker: Worker, engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtop.connector.handshakes.ask", lambda *_: None)
    worker._remote_agents["ready"] = {}
    for engine_id in ("own", "ready"):
        with pytest.raises(zmq.Again):
            _shake(worker, "127.0.0.1", engine, 2, engine_id)
        assert engine_id in worker.dst_num_blocks


def test_a_question_is_what_upstream_asks(silent: int) -> None:
    received: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.REP) as replier:
        port = replier.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            received.append(replier.recv())
            replier.send(b"")

        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            ask("127.0.0.1", port, [(0, 3)])
    assert msgspec.msgpack.decode(received[0]) == [b"get_meta_msg", 0, 3]
