"""Which TCP ports the demo listens on, and whether they are free."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from typing import Final

from kvtop.console.demo.processes import DemoError

HOST: Final = "127.0.0.1"
SIDE_CHANNEL_SPACING: Final = 100
"""Ports between two instances' NIXL side channels: kvtop's pull half listens 50 above the push half's."""
PULL_OFFSET: Final = 50
SPAN: Final = 3 * SIDE_CHANNEL_SPACING
LAST_BASE: Final = 65_535 - SPAN
AUTOMATIC: Final = range(18_000, 32_000, SPAN)
"""Candidates for the first port: below Linux's default range of ports for outgoing connections."""


class PortInUse(DemoError):
    """A port that the demo needs is taken."""


@dataclass(frozen=True)
class Ports:
    """The ports of one deployment, all in `base` … `base` + SPAN."""

    base: int

    @property
    def router(self) -> int:
        """Where clients send requests."""
        return self.base

    @property
    def router_metrics(self) -> int:
        """The router's own Prometheus endpoint."""
        return self.base + 1

    @property
    def ssh(self) -> int:
        """The agent's SSH server."""
        return self.base + 2

    def http(self, instance: int) -> int:
        """Return instance number `instance`'s HTTP port."""
        return self.base + 10 + instance

    def side_channel(self, instance: int) -> int:
        """Return the first NIXL side-channel port of instance number `instance`."""
        return self.base + SIDE_CHANNEL_SPACING * (1 + instance)

    def all(self) -> dict[str, int]:
        """Return every port that a prefill/decode pair listens on, by what listens there."""
        ports = {"router": self.router, "router's metrics": self.router_metrics, "agent's SSH": self.ssh}
        for number, name in enumerate(("prefill", "decode")):
            ports[name] = self.http(number)
            ports[f"{name}'s push handshakes"] = self.side_channel(number)
            ports[f"{name}'s pull handshakes"] = self.side_channel(number) + PULL_OFFSET
        return ports

    def check(self) -> None:
        """Raise PortInUse, naming the port and its purpose, if one of them is taken."""
        for purpose, port in self.all().items():
            if not _is_free(port):
                raise PortInUse(
                    f"port {port} (for the {purpose}) is in use: free it, or choose others with --port-base"
                )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports() -> Ports:
    """Return ports that are all free at the moment.

    Raises:
        PortInUse: no candidate is free as a whole.
    """
    for base in random.sample(AUTOMATIC, len(AUTOMATIC)):
        ports = Ports(base)
        try:
            ports.check()
        except PortInUse:
            continue
        return ports
    raise PortInUse(f"no {SPAN} free ports in a row between {AUTOMATIC.start} and {AUTOMATIC.stop}")
