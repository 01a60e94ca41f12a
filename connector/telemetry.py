"""What the engine tells the node agent, from inside the engine, at the engine's peril never.

One `Telemetry` per process of an instance owns the reporter (a bounded ring and its sender thread). Its
methods are called on the engine's threads: each builds one event and appends it, and nothing that goes wrong
in here may leave it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

from kvtop import __version__
from kvtop.agents.events import (
    Direction,
    EngineEvent,
    EngineHello,
    EngineStats,
    ErrorClass,
    LatencySamples,
    Mark,
    OrderAnswer,
    Process,
    Role,
    Side,
    Stage,
    TransferEvent,
)
from kvtop.agents.orders import ORDER_KINDS, Order
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.wire import WIRE_VERSION, Clock
from kvtop.connector.config import Settings
from kvtop.connector.upstream import VLLM_VERSION, init_logger, side_channel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvtop.telemetry")
_P = ParamSpec("_P")

_ROLES: Final[Mapping[str, Role]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}

_ORDERS: Final[Mapping[Process, list[str]]] = {
    "engine-core": list(ORDER_KINDS),
    "api-server": ["set-draining"],
    "worker": [],
}


def fails_open(
    method: Callable[Concatenate[Telemetry, _P], None],
) -> Callable[Concatenate[Telemetry, _P], None]:
    """Swallow and count whatever `method` raises: telemetry must never reach the engine."""

    @functools.wraps(method)
    def guarded(self: Telemetry, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.errors += 1
            if self.errors == 1:
                logger.warning("kvtop could not report an event; the engine goes on", exc_info=True)

    return guarded


class Telemetry:
    """One process's reports about one instance."""

    def __init__(self, reporter: Reporter | None) -> None:
        """Report through `reporter`; None reports nothing."""
        self._reporter = reporter
        self._last_load: tuple[int, int, float, bool] | None = None
        self._untaken: SimpleQueue[Order] = SimpleQueue()
        self._take: Callable[[Order], None] = self._untaken.put
        self._wake: Callable[[], None] = lambda: None
        self.errors = 0

    def attach(self, reporter: Reporter | None) -> None:
        """Report through `reporter` from now on."""
        self._reporter = reporter

    @fails_open
    def obey(self, take: Callable[[Order], None], wake: Callable[[], None]) -> None:
        """Have the agent's orders brought to `take` on the reporter's thread, and `wake` called after each.

        Those that came before are brought at once.
        """
        self._take, self._wake = take, wake
        with contextlib.suppress(Empty):
            while True:
                take(self._untaken.get_nowait())

    @fails_open
    def take_order(self, order: Order) -> None:
        """Take one of the agent's orders. Runs on the reporter's thread."""
        self._take(order)
        self._wake()

    @fails_open
    def put(self, event: EngineEvent) -> None:
        """Report any event."""
        if self._reporter is not None:
            self._reporter.put(event)

    def answer(self, order_id: int, *, ok: bool, message: str) -> None:
        """Say what became of an order."""
        self.put(OrderAnswer(time.monotonic_ns(), order_id, ok, message))

    @fails_open
    def step(
        self,
        side: Side,
        request_id: str,
        step: Stage | Mark,
        direction: Direction | None,
        *,
        rank: int = 0,
        peer_request_id: str | None = None,
        peer_engine_id: str | None = None,
        blocks: int | None = None,
        lease_s: float | None = None,
        ranks_expected: int | None = None,
        error_class: ErrorClass | None = None,
        error: str | None = None,
    ) -> None:
        """Report one step of one transfer; `lease_s` is the time until the lease ends."""
        if self._reporter is None:
            return
        now_ns = time.monotonic_ns()
        self._reporter.put(
            TransferEvent(
                at_ns=now_ns,
                side=side,
                request_id=request_id,
                step=step,
                rank=rank,
                direction=direction,
                peer_request_id=peer_request_id,
                peer_engine_id=peer_engine_id,
                blocks=blocks,
                lease_deadline_ns=None if lease_s is None else now_ns + int(lease_s * 1e9),
                ranks_expected=ranks_expected,
                error_class=error_class,
                error=error,
            )
        )

    @fails_open
    def done(
        self,
        side: Side,
        request_id: str,
        direction: Direction,
        *,
        rank: int,
        ranks_expected: int,
        figures: Iterable[Any],
    ) -> None:
        """Report a rank's completion with NIXL's figures, one `nixlXferTelemetry` a handle."""
        if self._reporter is None:
            return
        total_bytes = descriptors = 0
        post_us = wire_us = 0.0
        for each in figures:
            total_bytes += each.totalBytes
            descriptors += each.descCount
            post_us = max(post_us, each.postDuration)
            wire_us = max(wire_us, each.xferDuration)
        self._reporter.put(
            TransferEvent(
                at_ns=time.monotonic_ns(),
                side=side,
                request_id=request_id,
                step="done",
                rank=rank,
                direction=direction,
                bytes=total_bytes,
                descriptors=descriptors,
                post_us=float(post_us),
                wire_us=float(wire_us),
                ranks_expected=ranks_expected,
            )
        )

    @fails_open
    def latency(self, ttft_s: list[float], itl_s: list[float]) -> None:
        """Report exact TTFT and ITL samples, in seconds."""
        if self._reporter is not None and (ttft_s or itl_s):
            self._reporter.put(LatencySamples(time.monotonic_ns(), list(ttft_s), list(itl_s)))

    @fails_open
    def load(self, running: int, waiting: int, kv_usage: float) -> None:
        """Report the scheduler's load where it changed; `kv_usage` is the used share of the KV cache.

        vLLM records every engine step, and an engine that waits for a transfer steps without pause.
        """
        load = (running, waiting, round(kv_usage, 2), kv_usage > 0)
        if self._reporter is not None and load != self._last_load:
            self._last_load = load
            self._reporter.put(
                EngineStats(at_ns=time.monotonic_ns(), running=running, waiting=waiting, kv_usage=kv_usage)
            )

    @fails_open
    def close(self) -> None:
        """Say that this process stops in order, and send what is queued."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.close()


_of_process: dict[str, Telemetry] = {}


def telemetry_for(
    vllm_config: VllmConfig,
    settings: Settings,
    process: Process | None = None,
    dp_index: int | None = None,
) -> Telemetry:
    """Return this process's telemetry for the instance; the scheduler and a worker in one process share it.

    The API server names the data-parallel index of the engine that it means; an engine's own processes are
    configured with it. Never raises: an instance that cannot report serves on without.
    """
    key = f"{vllm_config.kv_transfer_config.engine_id}/{dp_index}"
    known = _of_process.get(key)
    if known is None:
        known = _of_process[key] = Telemetry(None)
        known.attach(_open_reporter(vllm_config, settings, process, dp_index, known.take_order))
        atexit.register(known.close)  # the API server's stat logger has no hook for the end
    return known


def _open_reporter(
    vllm_config: VllmConfig,
    settings: Settings,
    process: Process | None,
    dp_index: int | None,
    on_order: Callable[[Order], None],
) -> Reporter | None:
    """Start the reporter, or return None where reporting is off or impossible."""
    if not settings.report:
        return None
    try:
        paths = RuntimePaths.at(settings.runtime_dir) if settings.runtime_dir else RuntimePaths.default()
        hello = hello_of(vllm_config, settings, process, dp_index)
        reporter = Reporter(hello, paths, on_order=on_order)
        reporter.start()
    except Exception:
        logger.warning("kvtop cannot report to a node agent; the engine goes on without", exc_info=True)
        return None
    return reporter


def hello_of(
    vllm_config: VllmConfig, settings: Settings, process: Process | None, dp_index: int | None
) -> EngineHello:
    """Return what a process of the instance says of itself, by which the agent tells instances apart."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    role = _ROLES[transfer.kv_role]
    engine_id = str(transfer.engine_id)
    index = parallel.data_parallel_index if dp_index is None else dp_index
    suffix = f"_dp{index}"  # as vLLM's engine core appends it
    if parallel.data_parallel_size > 1 and dp_index is not None and not engine_id.endswith(suffix):
        engine_id += suffix
    kind = process or _process_kind()
    name = settings.name or f"{role}-{side_channel()[1]}"
    return EngineHello(
        wire_version=WIRE_VERSION,
        software=f"kvtop {__version__}, vllm {VLLM_VERSION}",
        process=kind,
        pid=os.getpid(),
        rank=parallel.rank,
        engine_id=engine_id,
        name=f"{name}-dp{index}" if parallel.data_parallel_size > 1 else name,
        role=role,
        mode=settings.mode,
        tp_size=parallel.tensor_parallel_size,
        model=_model_name(vllm_config),
        clock=Clock(time.monotonic_ns(), time.time_ns()),
        orders=_ORDERS[kind],
    )


def _model_name(vllm_config: VllmConfig) -> str:
    names = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    return str(names[0] if isinstance(names, list) else names)


def _process_kind() -> Process:
    """Tell a worker of its own from the engine core (which holds the worker with the uniproc executor)."""
    return "worker" if "Worker" in multiprocessing.current_process().name else "engine-core"
