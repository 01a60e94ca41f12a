"""What an engine tells its node agent: messages on `ingest.sock`.

Each process of a vLLM instance (engine core, workers, API server) opens its own connection: an
`EngineHello`, then `Batch` frames. Simulated engines send the very same messages with `simulated=True`.

Stamps are CLOCK_MONOTONIC in ns, which Linux shares between all processes of one host.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvtop.agents.wire import Clock

Pid = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Total = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Bounded where it comes in, so that sums of it can go out again."""

Role = Literal["prefill", "decode", "both"]
Direction = Literal["push", "pull"]
Side = Literal["prefill", "decode"]
Process = Literal["engine-core", "worker", "api-server"]

Stage = Literal[
    "queued",
    "registered",
    "matched",
    "handshaking",
    "posting",
    "on_wire",
    "done",
    "failed",
    "expired",
    "cancelled",
    "quarantined",
]
"""A transfer's stages in order of progress, then the ways it can end.

queued: P's blocks are finished and held, or D has the request (whichever is known first).
registered: D told P where to write (push only). matched: P's finished blocks met the registration (push),
or D's allocation met P's block ids (pull). handshaking: the initiator waits for the NIXL handshake.
posting: descriptors are being built and posted. on_wire: the post returned.
done: the initiator saw completion, or D reported the arrival and the initiator cannot report.
"""

Mark = Literal["allocated", "received", "released", "skipped", "settled"]
"""Points in a transfer's life that are no stage of their own.

allocated: D's blocks are allocated. received: D's scheduler saw the KV arrive. released: P's blocks are free
again. skipped: nothing had to move (D held the whole prefix). settled: the quarantine of an ended transfer is
over, nothing can be written any more.
"""

Blocker = Literal["writes", "reads", "leases", "registrations", "quarantine"]
"""What keeps an instance from being drained.

writes and reads: on the wire. leases: finished blocks held for a peer. registrations: requests on D whose KV
has not come and is not being read. quarantine: transfers that ended while their write could not be stopped.
"""

PairState = Literal["handshaking", "ready", "failed", "evicted"]

ErrorClass = Literal["transport", "handshake", "notify", "expiry", "cancel", "parameters", "other"]


class EngineHello(msgspec.Struct, tag="engine-hello", frozen=True, kw_only=True):
    """The first frame of an engine process."""

    wire_version: int
    software: str
    """For people: kvtop's and the engine's version."""
    process: Process
    pid: Pid
    rank: int = 0
    """Tensor-parallel rank of a worker; 0 elsewhere."""
    engine_id: str
    """vLLM's `kv_transfer_config.engine_id`: names the instance's incarnation, shared by its processes."""
    name: str
    """The instance's name for people, e.g. `prefill-0`; the same across restarts."""
    role: Role
    mode: Direction
    """The direction that requests take unless they say otherwise."""
    tp_size: int = 1
    model: str = ""
    clock: Clock
    simulated: bool = False
    previous_agent_lost_ns: int | None = None
    """When this process last lost an agent; None on its first connection. The agent shows the time from
    there to now as a gap in what it knows."""
    dropped_events: Total = 0
    """Events that this process dropped so far because its ring was full."""
    orders: list[str] = []
    """The kinds of order (`kvtop.agents.orders.OrderKind`) that this process obeys."""


class TransferEvent(msgspec.Struct, tag="transfer", frozen=True, kw_only=True, omit_defaults=True):
    """One step in one KV transfer, as one side saw it. None means not known to this side."""

    at_ns: int
    side: Side
    request_id: str
    """The reporting side's own vLLM request id."""
    step: Stage | Mark
    rank: int = 0
    """Tensor-parallel rank that reports; the scheduler reports as rank 0."""
    direction: Direction | None = None
    peer_request_id: str | None = None
    peer_engine_id: str | None = None
    blocks: int | None = None
    """KV blocks (logical) that take part."""
    bytes: int | None = None
    """Payload bytes of the completed NIXL transfer of this rank."""
    descriptors: int | None = None
    """Descriptors of that transfer after NIXL merged contiguous ones."""
    post_us: float | None = None
    wire_us: float | None = None
    """NIXL's own post and transfer durations of this rank."""
    lease_deadline_ns: int | None = None
    ranks_expected: int | None = None
    """How many ranks report a completion for this transfer on the reporting side."""
    error_class: ErrorClass | None = None
    error: str | None = None


class LatencySamples(msgspec.Struct, tag="latency", frozen=True, omit_defaults=True):
    """Exact samples from vLLM's stat logger since the last message, in seconds."""

    at_ns: int
    ttft_s: list[float] = []
    itl_s: list[float] = []


class EngineStats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """The scheduler's load at one moment."""

    at_ns: int
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""


class EngineStopping(msgspec.Struct, tag="stopping", frozen=True):
    """The engine process is shutting down in order."""

    at_ns: int


class OrderAnswer(msgspec.Struct, tag="order-answer", frozen=True):
    """What became of one order, once it has taken effect in the process that sends this, or cannot."""

    at_ns: int
    order_id: Total
    ok: bool
    message: str = ""
    """One line for the operator: what was done, or why not and what to do."""


class PairReport(msgspec.Struct, frozen=True):
    """What the engine knows of one peer."""

    engine_id: str
    state: PairState
    since_ns: int
    reason: str = ""
    address: str = ""
    """host:port of the peer's handshakes."""


class InstanceReport(msgspec.Struct, tag="instance-report", frozen=True, kw_only=True):
    """What holds in the engine core: sent on change."""

    at_ns: int
    mode: Direction
    peer_modes: dict[str, Direction] = {}
    """Exceptions to `mode`, by the peer's engine id."""
    draining: bool = False
    blockers: dict[Blocker, int] = {}
    """How many of each there are; an instance that drains is drained when there is none."""
    quarantined_blocks: Total = 0
    """KV blocks that nobody may use, since a write may still reach them."""
    quarantined_since_ns: int | None = None
    """When the oldest of them went into quarantine."""
    pairs: list[PairReport] = []


EngineEvent = TransferEvent | LatencySamples | EngineStats | EngineStopping | OrderAnswer | InstanceReport


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """Events in the order in which they happened in the sending process."""

    events: list[EngineEvent]
    dropped_events: Total = 0
    """Running total of events that this process dropped because its ring was full."""


ENGINE_HELLO = msgspec.msgpack.Decoder(EngineHello)
ENGINE_BATCH = msgspec.msgpack.Decoder(Batch)
