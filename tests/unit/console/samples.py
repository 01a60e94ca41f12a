"""A made-up fleet with one of everything, at a fixed moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from kvtop.agents.latency import LatencyWindow
from kvtop.agents.model import Endpoint, Instance, Latency, Node, Sketch, Transfer
from kvtop.agents.wire import Clock
from kvtop.console.clock import Moment
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.state import FleetState, LinkState, NodeState

NOW = Moment(wall_s=1_700_000_591.4, monotonic_s=5000.0)
S = 1_000_000_000
NODE_NOW_NS = 9000 * S
"""NOW on every made-up node's monotonic clock."""


class FixedClock:
    """A clock that a test moves."""

    def __init__(self, moment: Moment = NOW) -> None:
        self.moment = moment

    def now(self) -> Moment:
        return self.moment

    def advance(self, seconds: float) -> None:
        self.moment = Moment(self.moment.wall_s + seconds, self.moment.monotonic_s + seconds)


class ManualFeed:
    """A feed whose states a test publishes."""

    def __init__(self, *states: FleetState) -> None:
        self._queue: asyncio.Queue[FleetState] = asyncio.Queue()
        self.closed = False
        for state in states:
            self.publish(state)

    def publish(self, state: FleetState) -> None:
        self._queue.put_nowait(state)

    async def states(self) -> AsyncIterator[FleetState]:
        while True:
            yield await self._queue.get()

    async def aclose(self) -> None:
        self.closed = True


def agent(name: str = "p01") -> Node:
    clock = Clock(NODE_NOW_NS, int(NOW.wall_s * S))
    return Node(name=name, software="kvtop 0.1.0", agent_pid=42, agent_started_ns=1, clock=clock)


def sketch(values_s: Iterable[float]) -> Sketch:
    window = LatencyWindow()
    window.add(S, values_s, [])
    frozen = window.freeze(S)
    assert frozen is not None
    return frozen.ttft


def latency(ttft_s: Iterable[float], itl_s: Iterable[float] = ()) -> Latency:
    return Latency(60.0, sketch(ttft_s), sketch(itl_s))


def instance(name: str = "prefill-0", **fields: Any) -> Instance:
    role = "decode" if name.startswith("decode") else "prefill"
    return Instance(
        **{
            "engine_id": f"{name}-engine",
            "name": name,
            "role": role,
            "mode": "push",
            "state": "serving",
            "state_since_ns": NODE_NOW_NS - 60 * S,
            **fields,
        }
    )


def transfer(row_id: int, stage: str = "on_wire", age_s: float = 1.0, **fields: Any) -> Transfer:
    since_ns = NODE_NOW_NS - int(age_s * S)
    return Transfer(
        **{
            "id": row_id,
            "direction": "push",
            "stage": stage,
            "stage_since_ns": since_ns,
            "first_seen_ns": since_ns - S,
            "prefill": Endpoint("prefill-0-engine", "prefill-0", f"cmpl-{row_id}-p"),
            "decode": Endpoint("decode-0-engine", "decode-0", f"cmpl-{row_id}-d"),
            **fields,
        }
    )


def node(
    target: str = "p01",
    instances: Iterable[Instance] = (),
    transfers: Iterable[Transfer] = (),
    link: LinkState | None = None,
) -> NodeState:
    rows: Mapping[int, Transfer] = {each.id: each for each in transfers}
    link = link or LinkState("live", NOW.wall_s - 300)
    return NodeState(target, link, agent(target), tuple(instances), rows, NOW)


def lost(target: str = "p09", ago_s: float = 12.0, instances: Iterable[Instance] = ()) -> NodeState:
    error = ConnectError(target, "unreachable", f"port 22 of {target} is closed", "is sshd running there?")
    return node(target, instances, link=LinkState("lost", NOW.wall_s - ago_s, error, 3))


def never_reached(target: str = "p10") -> NodeState:
    error = ConnectError(target, "unreachable", f"port 22 of {target} is closed", "is sshd running there?")
    return NodeState(target, LinkState("lost", NOW.wall_s - 1, error, 1))


def small_fleet(*, simulated: bool = False) -> FleetState:
    """Return one live node with a pair, one lost node, one without an engine."""
    pair = [
        instance("prefill-0", simulated=simulated, stage_depths={"queued": 2}, latency=latency([0.03] * 10)),
        instance("decode-0", simulated=simulated, latency=latency([0.05] * 10, [0.008] * 100)),
    ]
    rows = [transfer(1), transfer(2, "queued", 42.0), transfer(3, "done", 5.0, bytes=65_536, wire_us=812.0)]
    return FleetState([node("p01", pair, rows), lost("p02", instances=[instance("decode-1")]), node("p03")])
