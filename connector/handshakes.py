"""Handshakes that hold up nobody else, and leave nothing behind where they fail.

Upstream shakes hands on one thread, and waits there 5 s for each peer that does not answer: whoever may name
a peer in a request holds up the first meeting of all others. Here a peer is asked on one of many threads
first; only who has answered is met on the one thread that NIXL's peer tables are changed on.

Upstream also notes what it is told about a peer before it knows that it is true, and keeps it where the
handshake fails: after one request with a wrong `tp_size`, no later read from that peer would succeed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import msgspec
import zmq

from kvtop.connector.params import MAX_RANKS
from kvtop.connector.upstream import GET_META_MSG, make_zmq_path, zmq_ctx

THREADS: Final = 32
"""How many peers that may not answer are waited for at a time, by each half."""
THREADS_FOR_KNOWN: Final = 4
ANSWER_TIMEOUT_S: Final = 5.0
"""As long as upstream waits."""
CONNECT_TIMEOUT_S: Final = 3.0
REFUSED_FOR_S: Final = 1.0
"""A listener that begins anew after a message that it could not read refuses for a moment."""

Address = tuple[str, int]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Greeters:
    """Threads to shake hands on; those for addresses that have answered before never wait for strangers.

    What has waited for a thread for too long fails, instead of holding up what comes after it.
    """

    def __init__(self, threads: int = THREADS, patience_s: float = ANSWER_TIMEOUT_S) -> None:
        """Meet up to `threads` strangers at a time; the others wait up to `patience_s` seconds."""
        self._for_strangers = ThreadPoolExecutor(threads, thread_name_prefix="kvtop-stranger")
        self._for_known = ThreadPoolExecutor(THREADS_FOR_KNOWN, thread_name_prefix="kvtop-handshake")
        self._patience_s = patience_s
        self.known: set[Address] = set()
        """Who has answered."""

    def submit(
        self, address: Address, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Call `fn` on a thread; TimeoutError where none is free in time."""
        submitted_s = time.monotonic()

        def run() -> _T:
            if time.monotonic() - submitted_s > self._patience_s:
                raise TimeoutError("too many handshakes are under way with peers that do not answer")
            return fn(*args, **kwargs)

        return (self._for_known if address in self.known else self._for_strangers).submit(run)

    def shutdown(self, wait: bool = True) -> None:
        """End; what has not begun never will."""
        for pool in (self._for_strangers, self._for_known):
            pool.shutdown(wait, cancel_futures=True)


class Told(NamedTuple):
    """What a request tells about a peer. It may be wrong."""

    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int


class ShakingHands:
    """Mixed in before upstream's worker class: its handshakes, asked for first, undone where they fail."""

    def shake_hands_on(self, nixl_thread: ThreadPoolExecutor) -> None:
        """Take the one thread on which NIXL's peer tables are changed."""
        worker: Any = self
        self._nixl_thread = nixl_thread
        self._asked: dict[tuple[str, Told], Future[None]] = {}  # under upstream's handshake lock
        self._greeters = Greeters()
        worker._handshake_initiation_executor.shutdown(wait=False)
        worker._handshake_initiation_executor = self._greeters  # upstream ends it

    def _ensure_handshake(
        self,
        engine_id: str,
        host: str,
        port: int,
        tp_size: int,
        dcp_size: int = 1,
        pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Future[None] | None:
        """Return None where a peer is ready, else what ends when it is, or raises why it cannot be.

        Takes upstream's place. There, who tells the truth about a peer shares the failure of who does not.
        """
        worker: Any = self
        worker._evict_stale_engines()
        told = Told(host, port, tp_size, dcp_size, pp_size)
        with worker._handshake_lock:
            if engine_id in worker._remote_agents:
                return None
            future = self._asked.get((engine_id, told))
            if future is None:
                future = self._greeters.submit(
                    (host, port), self._shake_hands, engine_id, told, notif_agents_only
                )
                self._asked[(engine_id, told)] = future
                future.add_done_callback(lambda _: self._asked.pop((engine_id, told)))
            return future

    def _shake_hands(self, engine_id: str, told: Told, notif_agents_only: bool) -> None:
        """Ask, and meet who answers. On one of the greeters' threads."""
        worker: Any = self
        try:
            self._ask(told)
            self._greeters.known.add((told.host, told.port))
            self._nixl_thread.submit(self._meet, engine_id, told, notif_agents_only).result()
        except Exception as error:
            worker._log_failure(
                failure_type="handshake_setup_failed", req_id=None, error=error, remote_engine_id=engine_id
            )
            worker.xfer_stats.record_failed_handshake()
            raise

    def _ask(self, told: Told) -> None:
        worker: Any = self
        sizes = told[2:]
        if not all(1 <= size <= MAX_RANKS for size in sizes):
            raise ValueError(f"no peer has these tensor, context and pipeline parallel sizes: {sizes}")
        ranks = worker.transfer_topo.handshake_target_ranks(told.tp_size, told.dcp_size)
        ask(told.host, told.port, ((stage, rank) for stage in range(told.pp_size) for rank in ranks))

    def _meet(self, engine_id: str, told: Told, notif_agents_only: bool) -> None:
        """Have upstream shake hands with who has answered. On the one thread."""
        worker: Any = self
        with worker._handshake_lock:
            if engine_id in worker._remote_agents:
                return
            worker._handshake_futures[engine_id] = Future()  # upstream forgets no peer meanwhile
        try:
            host, port, tp_size, dcp_size, pp_size = told
            agents, clock_offset_s = worker._nixl_handshake(
                host, port, tp_size, engine_id, dcp_size, pp_size, notif_agents_only
            )
            with worker._handshake_lock:
                worker._remote_agents[engine_id] = agents
                worker._engine_clock_offset[engine_id] = clock_offset_s
                worker._engine_last_active[engine_id] = time.perf_counter()
                worker._track_remote_engine_replacement(engine_id, host, port)
        except BaseException:
            self._forget_half_met(engine_id)
            raise
        finally:
            with worker._handshake_lock:
                del worker._handshake_futures[engine_id]

    def _forget_half_met(self, engine_id: str) -> None:
        """Undo what upstream has noted about a peer of which nothing is confirmed."""
        worker: Any = self
        if engine_id == worker.engine_id or engine_id in worker._remote_agents:
            return
        worker.transfer_topo.unregister_remote_engine(engine_id)
        for handle in worker.dst_xfer_side_handles.pop(engine_id, {}).values():
            worker.nixl_wrapper.release_dlist_handle(handle)
        for noted in (
            worker.kv_caches_base_addr,
            worker.dst_num_blocks,
            worker.dst_region_num_blocks,
            worker.dst_region_group_ids,
            worker.dst_uses_region_group_mapping,
            worker.dst_region_mem_types,
            worker.tp_mappings,
        ):
            noted.pop(engine_id, None)


def ask(host: str, port: int, ranks: Iterable[tuple[int, int]], timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Return once each (pipeline, tensor) rank of the engine behind a handshake port has answered.

    Raises:
        zmq.Again: one did not, within `timeout_s` seconds.
        OSError: nothing listens there, or the host is unknown or cannot be reached.
    """
    address = _connect(host, port)
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", address, port)) as requester:
        requester.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        for rank in ranks:
            requester.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
            requester.recv_multipart()


def _connect(host: str, port: int) -> str:
    """Return the IP address on which a host listens on `port`."""
    started_s = time.monotonic()
    while True:
        try:
            with socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT_S) as connection:
                return str(connection.getpeername()[0])
        except ConnectionRefusedError:
            if time.monotonic() - started_s > REFUSED_FOR_S:
                raise
            time.sleep(0.05)
