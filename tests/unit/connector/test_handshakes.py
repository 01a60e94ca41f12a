"""Peers that do not answer hold up nobody, and a handshake that fails leaves nothing behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


def _ask_on(greeters: Greeters, port: int, timeout_s: float = 0.5) -> Future[None]:
    return greeters.submit(("127.0.0.1", port), ask, "127.0.0.1", port, [(0, 0)], timeout_s)


def test_who_has_answered_before_never_waits_for_strangers(engine: int, silent: int) -> None:
    greeters = Greeters(threads=1)
    greeters.known.add(("127.0.0.1", engine))
    strangers = [_ask_on(greeters, silent) for _ in range(5)]
    _ask_on(greeters, engine).result()
    assert not strangers[0].done()
    greeters.shutdown()


def test_peers_that_hang_do_not_hold_up_a_first_meeting(engine: int, silent: int) -> None:
    greeters = Greeters()
    hanging = [_ask_on(greeters, silent, 1.0) for _ in range(20)]
    started = time.monotonic()
    _ask_on(greeters, engine).result()
    took = time.monotonic() - started
    assert not any(each.done() for each in hanging), "they were to be waited for still"
    assert took < 1.0
    assert {type(each.exception()) for each in hanging} == {zmq.Again}
    greeters.shutdown()


def test_what_finds_no_thread_in_time_fails_instead_of_waiting_behind_all_others(silent: int) -> None:
    greeters = Greeters(threads=2, patience_s=0.2)
    started = time.monotonic()
    hanging = [_ask_on(greeters, silent) for _ in range(50)]
    failures = [type(each.exception()) for each in hanging]
    assert failures == [zmq.Again] * 2 + [TimeoutError] * 48
    assert time.monotonic() - started < 2.0
    greeters.shutdown()


def test_what_has_not_begun_never_does_once_the_engine_ends(silent: int) -> None:
    greeters = Greeters(threads=1)
    under_way, waiting = (_ask_on(greeters, silent) for _ in range(2))
    wait_until(under_way.running, "the first to begin")
    greeters.shutdown(wait=False)
    assert waiting.cancelled()


class Upstream:
    """What upstream's worker notes in a handshake, and how that fails: the peer has one rank."""

    engine_id = "own"

    def __init__(self) -> None:
        self.released: list[int] = []
        self.failures: list[BaseException] = []
        self.met_on: list[str] = []
        self._remote_agents: dict[str, Any] = {}
        self._handshake_futures: dict[str, Any] = {}
        self._handshake_lock = threading.RLock()
        self._handshake_initiation_executor: Any = ThreadPoolExecutor(1)
        self._engine_clock_offset: dict[str, float] = {}
        self._engine_last_active: dict[str, float] = {}
        self.transfer_topo = SimpleNamespace(
            handshake_target_ranks=lambda tp_size, _dcp_size: range(tp_size),
            unregister_remote_engine=lambda engine_id: self.sizes.pop(engine_id, None),
        )
        self.nixl_wrapper = SimpleNamespace(release_dlist_handle=self.released.append)
        self.xfer_stats = SimpleNamespace(record_failed_handshake=lambda: None)
        self.sizes: dict[str, int] = {"own": 1}
        self.dst_xfer_side_handles: dict[str, dict[int, int]] = {}
        self.dst_num_blocks: dict[str, int] = {"own": 100}
        tables = "kv_caches_base_addr dst_region_num_blocks dst_region_group_ids"
        for name in f"{tables} dst_uses_region_group_mapping dst_region_mem_types tp_mappings".split():
            setattr(self, name, {"own": 1})

    def _evict_stale_engines(self) -> None:
        pass

    def _track_remote_engine_replacement(self, engine_id: str, host: str, port: int) -> None:
        pass

    def _log_failure(self, *, error: BaseException, **_: Any) -> None:
        self.failures.append(error)

    def _nixl_handshake(
        self, host: str, port: int, tp_size: int, engine_id: str, *_: Any
    ) -> tuple[dict[Any, Any], float]:
        self.sizes.setdefault(engine_id, tp_size)
        self.dst_num_blocks[engine_id] = 7
        self.dst_xfer_side_handles[engine_id] = {0: 70}
        if tp_size > 1:
            raise ValueError("block lengths differ")
        self.met_on.append(threading.current_thread().name)
        return {(0, 0): engine_id}, 0.5


class Worker(ShakingHands, Upstream):
    pass


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    with ThreadPoolExecutor(1, thread_name_prefix="nixl") as nixl_thread:
        worker.shake_hands_on(nixl_thread)
        yield worker
        worker._handshake_initiation_executor.shutdown()


@pytest.fixture
def all_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtop.connector.handshakes.ask", lambda *_: None)


def _shake(
    worker: Worker, engine_id: str, host: str, port: int, tp_size: int, dcp_size: int = 1, pp_size: int = 1
) -> None:
    future = worker._ensure_handshake(engine_id, host, port, tp_size, dcp_size, pp_size)
    assert future is not None
    future.result()


def test_peers_are_met_on_the_one_thread_that_nixl_is_told_of_them(worker: Worker, engine: int) -> None:
    _shake(worker, "peer", "127.0.0.1", engine, 1)
    assert worker._remote_agents == {"peer": {(0, 0): "peer"}}
    assert worker._engine_clock_offset == {"peer": 0.5}
    assert [name.startswith("nixl") for name in worker.met_on] == [True]
    assert worker._ensure_handshake("peer", "127.0.0.1", engine, 1) is None


def test_who_does_not_answer_is_not_met_at_all(worker: Worker) -> None:
    with pytest.raises(ConnectionRefusedError):
        _shake(worker, "peer", "127.0.0.1", _free_port(), 1)
    assert worker.sizes == {"own": 1}
    assert [type(error) for error in worker.failures] == [ConnectionRefusedError]


def test_who_is_told_wrongly_of_a_peer_holds_up_nobody_who_is_told_rightly(
    worker: Worker, engine: int, silent: int
) -> None:
    """Upstream has one handshake under way for an engine id, whatever it was told about that engine."""
    wrongly = worker._ensure_handshake("peer", "127.0.0.1", silent, 1)
    assert wrongly is not None
    again = worker._ensure_handshake("peer", "127.0.0.1", silent, 1, notif_agents_only=True)
    assert again is wrongly, "the same is asked once, by whomever: heartbeats and registrations both ask"

    _shake(worker, "peer", "127.0.0.1", engine, 1)

    assert not wrongly.done()
    assert not worker._handshake_futures, "a question keeps no peer from being forgotten"


@pytest.mark.parametrize("size", [0, -1, 10**12])
def test_a_peer_of_an_impossible_size_is_not_even_asked(worker: Worker, size: int) -> None:
    """Upstream would make a list of that many ranks."""
    for sizes in ((size, 1, 1), (1, size, 1), (1, 1, size)):
        with pytest.raises(ValueError, match="no peer has these"):
            _shake(worker, "peer", "127.0.0.1", 1, *sizes)


@pytest.mark.usefixtures("all_answer")
def test_a_handshake_that_fails_half_way_leaves_nothing_behind(worker: Worker) -> None:
    """Upstream would keep the size that the request named, and use it when the peer is met again."""
    with pytest.raises(ValueError, match="block lengths"):
        _shake(worker, "peer", "127.0.0.1", 1, 2)
    assert worker.sizes == {"own": 1}
    assert worker.dst_num_blocks == {"own": 100}
    assert worker.released == [70]
    assert not worker._handshake_futures

    _shake(worker, "peer", "127.0.0.1", 1, 1)
    assert worker.sizes["peer"] == 1


@pytest.mark.usefixtures("all_answer")
def test_what_the_engine_knows_of_itself_is_kept(worker: Worker) -> None:
    with pytest.raises(ValueError, match="block lengths"):
        _shake(worker, "own", "127.0.0.1", 1, 2)
    assert "own" in worker.dst_num_blocks


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
