"""Handshakes that hold up nobody else, and leave nothing behind where they fail.

Upstream shakes hands on one thread, and waits there 5 s for each peer that does not answer: whoever may name
a peer in a request holds up the first meeting of all others. Here a peer is asked on one of many threads
first; only who has answered is met on the one thread that NIXL's peer tables are changed on.

Upstream also notes what it is told about a peer before it knows that it is true, and keeps it where the
handshake fails: after one request with a wrong `tp_size`, no later transfer with that peer would succeed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import zmq

from kvtop.connector.params import MAX_RANKS
from kvtop.connector.upstream import GET_META_MSG, make_zmq_path, zmq_ctx

THREADS: Final = 32
"""How many peers that may not answer are waited for at a time, by each half."""
ANSWER_TIMEOUT_S: Final = 5.0
"""As long as upstream waits."""
CONNECT_TIMEOUT_S: Final = 3.0
REFUSED_FOR_S: Final = 1.0
"""A listener that begins anew after a message that it could not read refuses for a moment."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Greeters(ThreadPoolExecutor):
    """Threads to shake hands on. What has waited for one for too long fails, instead of holding up others."""

    def __init__(self, threads: int = THREADS, patience_s: float = ANSWER_TIMEOUT_S) -> None:
        """Have up to `threads` handshakes under way; the others wait up to `patience_s` seconds."""
        super().__init__(threads, thread_name_prefix="kvtop-handshake")
        self._patience_s = patience_s

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call `fn` on a thread; TimeoutError where none is free in time."""
        submitted_s = time.monotonic()

        def run() -> _T:
            if time.monotonic() - submitted_s > self._patience_s:
                raise TimeoutError("too many handshakes are under way with peers that do not answer")
            return fn(*args, **kwargs)

        return super().submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End; what has not begun never will."""
        del cancel_futures
        super().shutdown(wait, cancel_futures=True)


class ShakingHands:
    """Mixed in before upstream's worker class: its handshakes, asked for first, undone where they fail."""

    def shake_hands_on(self, nixl_thread: ThreadPoolExecutor) -> None:
        """Take the one thread on which NIXL's peer tables are changed."""
        worker: Any = self
        self._nixl_thread = nixl_thread
        worker._handshake_initiation_executor.shutdown(wait=False)
        worker._handshake_initiation_executor = Greeters()

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        remote_dcp_size: int = 1,
        remote_pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Any:
        """Shake hands. Upstream calls this on one of the greeters' threads.

        Raises:
            zmq.Again, OSError: the peer does not answer.
            ValueError: a peer of that size cannot be.
        """
        worker: Any = self
        sizes = (remote_tp_size, remote_dcp_size, remote_pp_size)
        if not all(1 <= size <= MAX_RANKS for size in sizes):
            raise ValueError(f"no peer has these tensor, context and pipeline parallel sizes: {sizes}")
        ranks = worker.transfer_topo.handshake_target_ranks(remote_tp_size, remote_dcp_size)
        ask(host, port, ((stage, rank) for stage in range(remote_pp_size) for rank in ranks))
        return self._nixl_thread.submit(
            self._meet,
            host,
            port,
            remote_tp_size,
            expected_engine_id,
            remote_dcp_size,
            remote_pp_size,
            notif_agents_only,
        ).result()

    def _meet(self, host: str, port: int, tp_size: int, engine_id: str, *sizes: Any) -> Any:
        try:
            return super()._nixl_handshake(host, port, tp_size, engine_id, *sizes)  # type: ignore[misc]
        except BaseException:
            self._forget_half_met(engine_id)
            raise

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
