"""The two halves of kvtop's connector: upstream's push and pull connectors, made to live side by side."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtop.agents.events import Direction, ErrorClass, PairReport
from kvtop.connector.config import Settings
from kvtop.connector.nixl_agent import SharedNixlAgent
from kvtop.connector.peer_messages import Peer, new_agent_name
from kvtop.connector.pull_worker import PullWorker
from kvtop.connector.push_worker import PushWorker
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    NixlBaseConnector,
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPushConnector,
    NixlPushConnectorScheduler,
    affinity_kept,
    init_logger,
    nixl_agents_from,
    on_cpu,
    open_nixl_agent,
    side_channel,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvtop.halves")

CPU_PROGRESS_DELAY_US: Final = 10_000
"""Measured: 10 ms costs an idle engine 1.8 % of a core less than 1 ms, and a transfer no time; 50 ms does."""


class PortInUseError(RuntimeError):
    """A port that the connector must listen on is taken."""


@dataclass
class BothHandshakes(KVConnectorHandshakeMetadata):
    """Each half's handshake metadata of one rank, on its way from worker to scheduler."""

    push: Any
    pull: Any


class BothMetadata(KVConnectorMetadata):
    """Each half's metadata of one engine step, on its way from scheduler to worker."""

    def __init__(self, push: Any, pull: Any, tasks: Tasks) -> None:
        """Hold upstream's `NixlConnectorMetadata` of both halves, and what kvtop adds."""
        self.push = push
        self.pull = pull
        self.tasks = tasks


@dataclass
class Tasks:
    """What the scheduler side wants of the workers in one engine step, beyond upstream's work."""

    give_ups: dict[str, GiveUp] = field(default_factory=dict)
    """D's requests that must not wait for KV any longer."""
    refused: dict[str, tuple[ErrorClass, str]] = field(default_factory=dict)
    """P's requests that ended without KV to give, where the reason is another than an abort."""
    for_readers: set[str] = field(default_factory=set)
    """P's requests whose blocks D is expected to read."""
    cancels: dict[str, tuple[ErrorClass, str]] = field(default_factory=dict)
    """P's transfers that an operator has cancelled."""
    unwanted: list[Unwanted] = field(default_factory=list)
    """KV on P that D does not want, and for which it has not registered."""
    evictions: dict[int, str] = field(default_factory=dict)
    """Engine ids of peers to forget, by order id."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return any(vars(self).values())


class GiveUp(NamedTuple):
    """Why D's request must not wait any longer."""

    error_class: ErrorClass
    reason: str


class Unwanted(NamedTuple):
    """KV that D does not want."""

    peer: Peer
    request_id: str
    prefill_request_id: str | None
    reason: str


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler side after a step."""

    settled: Counter[str] = field(default_factory=Counter)
    """D's requests, and from how many ranks' view nothing can be written for them any more."""
    writes: int = 0
    reads: int = 0
    """Requests with writes or reads on the wire, on the busiest rank."""
    pairs: dict[str, PairReport] = field(default_factory=dict)
    """Peers of which there is news, by engine id."""
    evictions: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """How many ranks have forgotten a peer, or could not since they use it, by the order's id."""

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Return this rank's and another's report as one."""
        return WorkerReport(
            self.settled + other.settled,
            max(self.writes, other.writes),
            max(self.reads, other.reads),
            {**self.pairs, **other.pairs},
            self.evictions + other.evictions,
        )


class PushHalf(NixlPushConnector):
    """Upstream's push connector around the given scheduler or worker."""

    def __init__(self, *args: Any, scheduler: Any = None, worker: Any = None) -> None:
        NixlBaseConnector.__init__(self, *args)
        self.connector_scheduler, self.connector_worker = scheduler, worker


class PullHalf(NixlPullConnector):
    """Upstream's pull connector around the given scheduler or worker."""

    def __init__(self, *args: Any, scheduler: Any = None, worker: Any = None) -> None:
        NixlBaseConnector.__init__(self, *args)
        self.connector_scheduler, self.connector_worker = scheduler, worker


class TwoHalves(NixlBaseConnector):
    """What both sides of kvtop's connector have."""

    push: PushHalf
    pull: PullHalf
    halves: Mapping[Direction, Any]
    telemetry: Telemetry


class PushScheduler(NixlPushConnectorScheduler):
    """Upstream's, with a handshake listener that no message can end.

    It refuses to be built where KV is read back from D; here the pull half does that (`reuse`).
    """

    is_bidirectional_kv_xfer_enabled = property(lambda _self: False, lambda _self, _value: None)

    @staticmethod
    def _nixl_handshake_listener(*args: Any) -> None:
        listen_on(NixlPushConnectorScheduler._nixl_handshake_listener, *args)


class PullScheduler(NixlPullConnectorScheduler):
    """Upstream's, with a handshake listener that no message can end."""

    @staticmethod
    def _nixl_handshake_listener(*args: Any) -> None:
        listen_on(NixlPullConnectorScheduler._nixl_handshake_listener, *args)


def listen_on(listener: Any, metadata: Any, ready: Any, stop: Any, host: str, port: int) -> None:
    """Serve handshakes until `stop` is set.

    Upstream's listener ends on a message that it cannot read, or that asks for a rank that is not there
    (a decode request with a wrong `tp_size` does that to P): then no peer could shake hands any more.
    """
    while not stop.is_set():
        try:
            listener(metadata, ready, stop, host, port)
        except Exception as error:
            logger.warning("a handshake on port %d could not be served: %r", port, error)


def scheduler_halves(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
) -> tuple[PushHalf, PullHalf]:
    """Return both halves for the scheduler; each listens for handshakes on a port of its own."""
    engine_id = vllm_config.kv_transfer_config.engine_id
    push = PushScheduler(vllm_config, engine_id, kv_cache_config)
    pull = PullScheduler(vllm_config, engine_id, kv_cache_config)
    pull.side_channel_port = push.side_channel_port + settings.pull_port_offset
    base = (vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    return PushHalf(*base, scheduler=push), PullHalf(*base, scheduler=pull)


def worker_halves(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings, telemetry: Telemetry
) -> tuple[PushHalf, PullHalf]:
    """Return both halves for one worker, on one NIXL agent."""
    shared: SharedNixlAgent | None = None
    opening: Direction = "push"

    def agent_of(name: str, config: Any) -> Any:
        nonlocal shared
        if shared is None:
            del name  # upstream's random one would not tell peers who understands kvtop's messages
            agent = open_nixl_agent(
                new_agent_name(),
                config,
                progress_delay_us(settings),
                scatter_gather=settings.scatter_gather,
            )
            shared = SharedNixlAgent(agent)
        return shared.half(opening)

    args = (vllm_config, vllm_config.kv_transfer_config.engine_id, kv_cache_config)
    with nixl_agents_from(agent_of), affinity_kept():
        push_worker = PushWorker(*args)
        opening = "pull"
        pull_worker = PullWorker(*args)
    assert shared is not None, "upstream's workers no longer take their NIXL agent from where they did"
    for worker in (push_worker, pull_worker):
        worker.observe(telemetry, shared)
    index = vllm_config.parallel_config.data_parallel_index  # as upstream's scheduler side adds it
    push_worker.pull_port = side_channel()[1] + index + settings.pull_port_offset
    push_worker.read_instead = pull_worker.read_instead
    base = (vllm_config, KVConnectorRole.WORKER, kv_cache_config)
    return PushHalf(*base, worker=push_worker), PullHalf(*base, worker=pull_worker)


def progress_delay_us(settings: Settings) -> int | None:
    """Return the progress thread's delay: as set, else a sleeping thread on CPU and upstream's elsewhere."""
    if settings.progress_delay_us is not None:
        return settings.progress_delay_us
    return CPU_PROGRESS_DELAY_US if on_cpu() else None


def check_port(host: str, port: int, direction: Direction) -> None:
    """Raise PortInUseError where `port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"the {direction} half cannot listen for NIXL handshakes on {host}:{port} "
                f"({error.strerror}): set VLLM_NIXL_SIDE_CHANNEL_PORT or kvtop_pull_port_offset"
            ) from error
