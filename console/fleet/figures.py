"""Figures of a scope: one instance, a node's instances, or the whole fleet.

Percentiles of a wider scope come from merged sketches, never from averaged percentiles. A sum over nothing
known is unknown, not 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvtop.agents import latency
from kvtop.agents.model import LIVE_STAGES, Instance, Latency
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState, NodeState


class Member(NamedTuple):
    """An instance with the node whose clock its stamps are in."""

    node: NodeState
    instance: Instance

    @property
    def key(self) -> tuple[str, str]:
        """The instance's identity in the fleet."""
        return self.node.target, self.instance.engine_id


class Figures(msgspec.Struct, frozen=True):
    """Sums over a scope's members whose node is live, and their merged latency."""

    label: str
    members: Sequence[Member]
    heard: int
    unheard: int
    """Nodes of the scope that are not live, so that their share is missing; `heard` are the others."""
    running: int | None
    waiting: int | None
    stage_depths: dict[str, int]
    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None
    failed: int | None
    latency: Latency | None

    def oldest_live_s(self, now: Moment) -> float | None:
        """Age of the oldest live transfer in the scope, seconds; None where there is none."""
        ages = (m.node.age_s(m.instance.oldest_live_ns, now) for m in self.members)
        return max((age for age in ages if age is not None), default=None)


def members_of(nodes: Iterable[NodeState]) -> list[Member]:
    """Return the instances of `nodes`, in order."""
    return [Member(node, instance) for node in nodes for instance in node.instances]


def fleet_figures(fleet: FleetState) -> Figures:
    """Return the figures of the whole fleet."""
    return figures("fleet", fleet.nodes)


def figures(label: str, nodes: Sequence[NodeState]) -> Figures:
    """Return the figures of all instances of `nodes`, under a label for people.

    A transfer that two of the instances take part in counts once.
    """
    live = [node for node in nodes if node.live]
    transfers = (transfer for node in live for transfer in node.transfers.values())
    depths: Counter[str] = Counter(transfer.stage for transfer in transfers if transfer.stage in LIVE_STAGES)
    failed = [sum(node.node.transfers_failed.values()) for node in live if node.node is not None]
    return _figures(
        label,
        members_of(live),
        heard=len(live),
        unheard=len(nodes) - len(live),
        stage_depths=dict(depths),
        failed=sum(failed) if failed else None,
    )


def instance_figures(member: Member) -> Figures:
    """Return the figures of one instance, also of one whose node is lost: they are its last known ones."""
    return _figures(
        member.instance.name,
        [member],
        heard=1,
        unheard=0,
        stage_depths=member.instance.stage_depths,
        failed=member.instance.failed,
    )


def _figures(
    label: str,
    members: Sequence[Member],
    *,
    heard: int,
    unheard: int,
    stage_depths: dict[str, int],
    failed: int | None,
) -> Figures:
    instances = [member.instance for member in members]
    # A request's first token reaches its client from the decode side.
    serving = [instance for instance in instances if instance.role != "prefill"] or instances
    return Figures(
        label=label,
        members=members,
        heard=heard,
        unheard=unheard,
        running=_sum(instance.running for instance in instances),
        waiting=_sum(instance.waiting for instance in instances),
        stage_depths=stage_depths,
        sent_bytes_per_s=_sum_float(instance.sent_bytes_per_s for instance in instances),
        received_bytes_per_s=_sum_float(instance.received_bytes_per_s for instance in instances),
        failed=failed,
        latency=_merged([i.latency for i in serving if i.latency is not None]),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_float(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _merged(parts: Sequence[Latency]) -> Latency | None:
    """Merge latencies over the same window; of mixed windows the result names the longest."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Latency(
        window_s=max(part.window_s for part in parts),
        ttft=latency.merge([part.ttft for part in parts]),
        itl=latency.merge([part.itl for part in parts]),
    )
