"""What the console knows of its fleet at one moment, as frozen values.

Stamps of a node are in that node's CLOCK_MONOTONIC. `NodeState` moves between that clock, the node's wall
clock and this machine's, so that nobody else has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from kvtop.agents.facts import Host
from kvtop.agents.model import LIVE_STAGES, Instance, Node, Transfer
from kvtop.console.clock import Moment
from kvtop.console.fleet.errors import ConnectError

LinkPhase = Literal["connecting", "live", "lost"]
_LIVE: Final = frozenset(LIVE_STAGES)


class LinkState(msgspec.Struct, frozen=True):
    """The connection to one target."""

    phase: LinkPhase
    since_s: float
    """Unix time of this machine when the phase began; a failed attempt to come back does not restart it."""
    error: ConnectError | None = None
    """Why it is lost, or why the last attempt failed."""
    attempts: int = 0
    """Failed attempts since it was last live."""


class NodeState(msgspec.Struct, frozen=True):
    """One target: its link, and what its agent said last."""

    target: str
    link: LinkState
    node: Node | None = None
    """None while its agent has never been heard."""
    instances: Sequence[Instance] = ()
    transfers: Mapping[int, Transfer] = {}
    received: Moment | None = None
    """When the last message arrived."""
    host: Host | None = None

    @property
    def live(self) -> bool:
        """Whether what this value says is current."""
        return self.link.phase == "live" and self.node is not None

    def now_ns(self, now: Moment) -> int:
        """Return `now` on the node's monotonic clock; a lost node's time stands still."""
        if self.node is None or self.received is None:
            return 0
        passed_s = now.monotonic_s - self.received.monotonic_s if self.live else 0.0
        return self.node.clock.monotonic_ns + round(passed_s * 1e9)

    def age_s(self, stamp_ns: int | None, now: Moment) -> float | None:
        """Return how long ago the node's stamp was, in seconds."""
        return None if stamp_ns is None else (self.now_ns(now) - stamp_ns) / 1e9

    @property
    def wall_offset_ns(self) -> int:
        """What to add to a stamp of this node to compare it with other nodes' stamps."""
        return self.node.clock.wall_ns - self.node.clock.monotonic_ns if self.node else 0

    def wall_s(self, stamp_ns: int) -> float:
        """Return the node's stamp as Unix time of the node's own wall clock."""
        if self.node is None:
            return 0.0
        return (self.node.clock.wall_ns + stamp_ns - self.node.clock.monotonic_ns) / 1e9


class FleetState(msgspec.Struct, frozen=True):
    """All targets, in the order in which they were named."""

    nodes: Sequence[NodeState] = ()

    @property
    def simulated(self) -> bool:
        """Whether anything in it comes from simulated engines."""
        return any(instance.simulated for node in self.nodes for instance in node.instances)

    @property
    def hopeless(self) -> bool:
        """Whether every target failed and none was ever heard: there is nothing to show."""
        return bool(self.nodes) and all(
            node.node is None and node.link.phase == "lost" for node in self.nodes
        )


def is_live(transfer: Transfer) -> bool:
    """Whether a transfer has not ended."""
    return transfer.stage in _LIVE
