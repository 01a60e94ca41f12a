"""What an agent tells consoles and scripts: one snapshot, then deltas of the same frozen values.

The same structs are what `--json` prints. Stamps ending in `_ns` are the node's CLOCK_MONOTONIC; `Node.clock`
places them in wall time. None means unknown, and is shown as `–`, never as 0.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvtop.agents.act import Command, Outcome, Plan, Progress
from kvtop.agents.events import Direction, ErrorClass, Mark, PairReport, Role, Stage
from kvtop.agents.facts import BucketedLatency, Exit, Host, KvCounters, ProcessStats
from kvtop.agents.wire import Clock, Refusal, Welcome

SCHEMA_VERSION: Final = 1
"""Version of the JSON that scripts get. Raised when a field changes meaning or goes away."""

InstanceState = Literal["starting", "serving", "draining", "drained", "stopped", "down", "stale"]
"""starting: attached, no statistics yet. serving: reporting. draining: serving, but it starts no new KV
transfer. drained: draining, and no transfer keeps it (`Instance.blockers` is empty); requests without a
transfer may still run or wait there. stale: attached but silent for longer than its reporting interval
allows. stopped: ended in order. down: its connections were lost."""

LIVE_STAGES: Final[tuple[Stage, ...]] = (
    "queued",
    "registered",
    "matched",
    "handshaking",
    "posting",
    "on_wire",
)


class Sketch(msgspec.Struct, frozen=True):
    """A mergeable quantile sketch (DDSketch) of durations in seconds, relative error 1 %.

    Bin `offset + i` holds `counts[i]` values in (gamma**(k-1), gamma**k]. See `kvtop.agents.latency`.
    """

    count: int = 0
    sum_s: float = 0.0
    min_s: float | None = None
    max_s: float | None = None
    zero_count: int = 0
    offset: int = 0
    counts: list[float] = []


class Latency(msgspec.Struct, frozen=True):
    """TTFT and ITL of one instance over one window."""

    window_s: float
    ttft: Sketch
    itl: Sketch


class Gap(msgspec.Struct, frozen=True):
    """A span for which the agent lacks an instance's events."""

    from_ns: int
    to_ns: int
    reason: str
    dropped_events: int | None = None
    """Events known to be lost; None where their number cannot be known."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM instance (or a simulated one) on the node."""

    engine_id: str
    name: str
    role: Role
    mode: Direction | None
    """The direction that requests take unless they name one, as the engine reports it."""
    state: InstanceState
    state_since_ns: int
    state_reason: str = ""
    simulated: bool = False
    model: str = ""
    software: str = ""
    pids: list[int] = []
    tp_size: int | None = 1
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    stage_depths: dict[str, int] = {}
    """Live transfers of this instance by stage."""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    """Payload bytes of completed transfers per wall-clock second over `rate_window_s`."""
    rate_window_s: float = 10.0
    transfers_done: int | None = 0
    transfers_failed: dict[str, int] = {}
    """Ended without success since the agent knows the instance, by `ErrorClass`."""
    oldest_live_ns: int | None = None
    """When the oldest live transfer of this instance was first seen."""
    latency: Latency | None = None
    dropped_events: int = 0
    gaps: list[Gap] = []
    peer_modes: dict[str, Direction] = {}
    """Exceptions to `mode`, by the peer's engine id."""
    draining: bool = False
    drained: bool = False
    """It drains and has no `blockers`. See `InstanceState`."""
    blockers: dict[str, int] = {}
    """What would keep it from being drained: how many of each `kvtop.agents.events.Blocker`."""
    quarantined_blocks: int | None = None
    """KV blocks that nobody may use, since a write may still reach them."""
    quarantined_since_ns: int | None = None
    pairs: list[PairReport] = []
    """What its engine knows of each peer."""
    orders: list[str] = []
    """The kinds of order that it takes (`kvtop.agents.orders.OrderKind`); none where it only reports."""
    processes: list[ProcessStats] = []
    """Its attached processes, in order of pid; empty where the agent does not sample them."""
    exit: Exit | None = None
    """How it ended, once it is down or stopped."""
    observed: str = ""
    """What the agent reads it from, e.g. `vLLM /metrics`; empty where kvtop's connector reports. Of an
    observed one there is no transfer in the ledger, and it takes no order."""
    queues: dict[str, int] = {}
    """Requests in an observed server's KV queues, by its own names for them."""
    latency_buckets: BucketedLatency | None = None
    """In place of `latency`, where only a server's histograms are known."""
    kv_counters: KvCounters | None = None
    """Where it is observed: its own KV counters."""

    @property
    def failed(self) -> int | None:
        """How many of its transfers ended without success, as the ledger or, observed, it itself counts."""
        if self.observed:
            return self.kv_counters.failed if self.kv_counters else None
        return sum(self.transfers_failed.values())


class Endpoint(msgspec.Struct, frozen=True):
    """One side of a transfer."""

    engine_id: str
    name: str
    """The instance's name; the engine id where the agent does not know that instance."""
    request_id: str | None = None


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One KV transfer, P and D joined."""

    id: int
    """Row number, unique within one incarnation of the agent."""
    direction: Direction | None = None
    stage: Stage
    stage_since_ns: int
    first_seen_ns: int
    prefill: Endpoint | None = None
    decode: Endpoint | None = None
    times_ns: dict[Stage | Mark, int] = {}
    """First time at which each step was reported."""
    blocks: int | None = None
    bytes: int | None = None
    descriptors: int | None = None
    post_us: float | None = None
    wire_us: float | None = None
    """NIXL's durations; with several ranks the slowest rank's. Bytes and descriptors are sums."""
    ranks_done: int = 0
    ranks_expected: int | None = None
    lease_deadline_ns: int | None = None
    error_class: ErrorClass | None = None
    error: str | None = None
    simulated: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The agent and its host."""

    name: str
    software: str
    agent_pid: int
    agent_started_ns: int
    clock: Clock
    """Read when the message was built."""
    rejected_frames: int = 0
    """Malformed or oversized frames that closed a connection."""
    finished_kept: int = 0
    """Capacity of the ring of finished transfers."""
    transfers_done: int = 0
    transfers_failed: dict[str, int] = {}
    """Transfers that ended since the agent started, each counted once; failures by `ErrorClass`."""


class ClientHello(msgspec.Struct, tag="client-hello", frozen=True):
    """The first frame of a console or script."""

    wire_version: int
    software: str


class Subscribe(msgspec.Struct, tag="subscribe", frozen=True):
    """Asks for one snapshot and, unless `interval_s` is None, a delta at most that often."""

    interval_s: float | None = None
    finished: int = 200
    """How many finished transfers the snapshot holds at most, newest first."""


class Snapshot(msgspec.Struct, tag="snapshot", frozen=True, kw_only=True):
    """All that the agent knows, at one moment. Transfers are in order of `id`."""

    node: Node
    instances: list[Instance] = []
    transfers: list[Transfer] = []
    host: Host | None = None
    """None until it was first sampled."""


class Delta(msgspec.Struct, tag="delta", frozen=True, kw_only=True):
    """What changed since the last message on this connection. A value replaces its older self whole."""

    node: Node
    instances: list[Instance] = []
    transfers: list[Transfer] = []
    forgotten: list[int] = []
    """Ids of transfers that left the agent's ring, or turned out to be another row's."""
    gone: list[str] = []
    """Engine ids of instances that the agent no longer shows."""
    host: Host | None = None
    """None where it is as it was."""


AgentMessage = Welcome | Refusal | Snapshot | Delta | Plan | Progress | Outcome
ClientMessage = Subscribe | Command

AGENT_MESSAGE = msgspec.msgpack.Decoder(AgentMessage)
CLIENT_HELLO = msgspec.msgpack.Decoder(ClientHello)
CLIENT_MESSAGE = msgspec.msgpack.Decoder(ClientMessage)
