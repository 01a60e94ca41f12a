"""A running prefill/decode pair with the router in front; the demo and the tests start it alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtop.console.demo.ports import HOST, Ports
from kvtop.console.demo.processes import Processes
from kvtop.console.demo.servers import Connector, Server, start_router, start_server, wait_healthy

START_TIMEOUT_S: Final = 240.0
"""Servers were healthy after 26 to 90 s on two cores, depending on what else ran."""
ROUTER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Pair:
    """One prefill and one decode server behind a router."""

    prefill: Server
    decode: Server
    router_url: str

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both vLLM servers."""
        return self.prefill, self.decode


def start_pair(
    processes: Processes,
    ports: Ports,
    model: Path,
    connector: Connector,
    *,
    decode_connector: Connector | None = None,
    env: Mapping[str, str] | None = None,
    prefix: str = "",
    on_ready: Callable[[str], None] = lambda name: None,
) -> Pair:
    """Start both servers at once and the router in front, and wait until all of them answer.

    Args:
        processes: owns what is started.
        ports: where it listens.
        model: the model's folder.
        connector: the KV connector of both servers.
        decode_connector: D's, where it is another.
        env: further environment variables of the servers.
        prefix: put before the processes' names, where several pairs run.
        on_ready: told the name of each process as it becomes ready.

    Raises:
        ProcessFailed: one of them ended; the message holds the end of its log.
        NotReady: one of them does not answer in time.
    """
    prefill = Server(f"{prefix}prefill-0", ports.http(0), "prefill", ports.side_channel(0))
    decode = Server(f"{prefix}decode-0", ports.http(1), "decode", ports.side_channel(1))
    pair = Pair(prefill, decode, f"http://{HOST}:{ports.router}")
    start_server(processes, prefill, model, connector, env)
    start_server(processes, decode, model, decode_connector or connector, env)
    health = {server.name: f"{server.url}/health" for server in pair.servers}
    wait_healthy(processes, health, timeout_s=START_TIMEOUT_S, on_ready=on_ready)
    router = f"{prefix}router"
    start_router(processes, router, ports, prefill, decode)
    wait_healthy(
        processes,
        {router: f"{pair.router_url}/health"},
        timeout_s=ROUTER_TIMEOUT_S,
        on_ready=on_ready,
    )
    return pair


def start_alone(
    processes: Processes,
    port: int,
    model: Path,
    *,
    name: str = "aggregated",
    env: Mapping[str, str] | None = None,
) -> Server:
    """Start one server that computes prompts and outputs itself, and wait until it answers.

    Raises:
        ProcessFailed, NotReady: see `start_pair`.
    """
    server = Server(name, port)
    start_server(processes, server, model, env=env)
    wait_healthy(processes, {name: f"{server.url}/health"}, timeout_s=START_TIMEOUT_S)
    return server
