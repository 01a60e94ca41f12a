"""A console's copy of what an agent knows: one snapshot, kept current by deltas."""

from __future__ import annotations

from kvtop.agents.facts import Host
from kvtop.agents.model import Delta, Instance, Node, Snapshot, Transfer


class Mirror:
    """The state of one node as last heard."""

    def __init__(self) -> None:
        """Begin empty."""
        self.node: Node | None = None
        self.instances: dict[str, Instance] = {}
        """By engine id."""
        self.transfers: dict[int, Transfer] = {}
        """By row id."""
        self.host: Host | None = None

    def apply(self, message: Snapshot | Delta) -> None:
        """Take a message: a snapshot replaces everything, a delta what it names."""
        self.node = message.node
        self.host = message.host if isinstance(message, Snapshot) else message.host or self.host
        if isinstance(message, Snapshot):
            self.instances.clear()
            self.transfers.clear()
        self.instances.update({each.engine_id: each for each in message.instances})
        self.transfers.update({each.id: each for each in message.transfers})
        if isinstance(message, Delta):
            for row_id in message.forgotten:
                self.transfers.pop(row_id, None)
            for engine_id in message.gone:
                self.instances.pop(engine_id, None)
