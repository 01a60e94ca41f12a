"""A real prefill/decode deployment for tests, started by the demo's own code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvtop.agents.client import connect_unix
from kvtop.agents.model import Instance, Snapshot
from kvtop.agents.runtime import ENV_RUNTIME_DIR, RuntimePaths
from kvtop.console.demo.access import runtime_environment
from kvtop.console.demo.deployment import START_TIMEOUT_S, Pair, start_alone, start_pair
from kvtop.console.demo.load import Prompt, make_prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.ports import free_ports
from kvtop.console.demo.processes import Processes
from kvtop.console.demo.servers import (
    MODEL_NAME,
    Connector,
    Role,
    Server,
    kvtop_connector,
    start_server,
    wait_healthy,
)

REPOSITORY = Path(__file__).parents[2]
REQUEST_TIMEOUT_S = 60.0
DEADLINE_S = 4.0
LEASE_S = 6
"""Of the "impatient" pair: how long D waits for KV, and how long P holds it."""
SHORT_LEASE_S = 3
"""Of the "relayed" pair."""
REUSE_S = 20
"""Of the "reuse" pair: how long D keeps its KV for another turn."""
DAMAGE_FILE = "damage"
DAMAGE_WHILE = "KVTOP_TEST_DAMAGE_WHILE"
"""The variable that tells `tests.support.corrupting`, which runs inside the engine, of that file."""

_IMPATIENT = {"kvtop_mode": "push", "kvtop_deadline_s": DEADLINE_S, "kv_lease_duration": LEASE_S}
CONNECTORS: Mapping[str, Connector] = {
    "stock-push": Connector("NixlPushConnector"),
    "stock-pull": Connector("NixlPullConnector"),
    "kvtop-push": Connector("KvtopConnector", "kvtop.connector", {"kvtop_mode": "push"}),
    "kvtop-pull": Connector("KvtopConnector", "kvtop.connector", {"kvtop_mode": "pull"}),
    "kvtop-admission": kvtop_connector("push"),
    "kvtop-push-spinning": Connector(
        "KvtopConnector", "kvtop.connector", {"kvtop_mode": "push", "kvtop_progress_delay_us": 0}
    ),
    "kvtop-small-cache": Connector(
        "KvtopConnector",
        "kvtop.connector",
        {"kvtop_mode": "push"},
        arguments=("--num-gpu-blocks-override", "128"),
    ),
    "kvtop-impatient": Connector("KvtopConnector", "kvtop.connector", _IMPATIENT),
    "kvtop-one-rank": Connector("TwoRanksConnector", "tests.support.two_ranks", _IMPATIENT),
    "kvtop-two-ranks": Connector(
        "TwoRanksConnector",
        "tests.support.two_ranks",
        _IMPATIENT,
        arguments=("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
    ),
    "kvtop-reuse": Connector(
        "KvtopConnector",
        "kvtop.connector",
        {"kvtop_mode": "push", "bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": REUSE_S},
    ),
    "kvtop-patient": Connector(
        "KvtopConnector", "kvtop.connector", {"kvtop_mode": "push"}, load_failure_policy="fail"
    ),
    "kvtop-failing": Connector(
        "KvtopConnector",
        "kvtop.connector",
        {"kvtop_mode": "push", "kv_lease_duration": LEASE_S},
        load_failure_policy="fail",
    ),
    "kvtop-relayed": Connector(
        "RelayedConnector",
        "tests.support.relayed",
        {"kvtop_mode": "push", "kvtop_deadline_s": 15.0, "kv_lease_duration": SHORT_LEASE_S},
        arguments=("--max-num-seqs", "1"),
    ),
    "corrupting": Connector("CorruptingConnector", "tests.support.corrupting", {"kvtop_mode": "push"}),
}


@dataclass(frozen=True)
class Completion:
    """What a server answered. Token ids tell more than text, in which bytes that are no UTF-8 look alike."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Turn(Prompt):
    """A prompt given as tokens: what a model answered need be no text."""

    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class NixlCounters:
    """vLLM's own `vllm:nixl_*` counters, summed over a pair: each transfer counts on its initiator."""

    transfers: int
    bytes: int
    descriptors: int
    failed: int

    def since(self, earlier: NixlCounters) -> NixlCounters:
        """Return what was added after `earlier`."""
        return NixlCounters(
            self.transfers - earlier.transfers,
            self.bytes - earlier.bytes,
            self.descriptors - earlier.descriptors,
            self.failed - earlier.failed,
        )


def complete(url: str, prompt: Prompt) -> Completion:
    """Have one prompt completed, greedily; a failed request fails the test with the server's answer."""
    body = {
        "model": MODEL_NAME,
        "prompt": input_of(prompt),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return Completion(tuple(choice["token_ids"]), choice["text"])


def input_of(prompt: Prompt) -> str | list[int]:
    """Return a prompt as vLLM's API takes it."""
    return list(prompt.token_ids) if isinstance(prompt, Turn) else prompt.text


def complete_all(url: str, prompts: Sequence[Prompt], *, in_flight: int = 1) -> list[Completion]:
    """Have all prompts completed, `in_flight` at a time; the answers are in the prompts' order."""
    with ThreadPoolExecutor(in_flight) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt), prompts))


def prompts(count: int, seed: int) -> list[Prompt]:
    """Return prompts of all lengths; the same seed gives the same ones."""
    source = random.Random(seed)
    return [make_prompt(seed * 1000 + number, source) for number in range(count)]


class Load:
    """Prompts being completed in the background, `in_flight` at a time."""

    def __init__(self, url: str, prompts: Sequence[Prompt], *, in_flight: int) -> None:
        self._pool = ThreadPoolExecutor(in_flight)
        self._futures = [self._pool.submit(complete, url, prompt) for prompt in prompts]

    @property
    def finished(self) -> int:
        """How many prompts have been answered, or have failed."""
        return sum(future.done() for future in self._futures)

    def results(self) -> list[Completion]:
        """Wait for all answers; a failed request fails the test."""
        return [future.result() for future in self._futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class RunningPair:
    """A pair that serves."""

    processes: Processes
    pair: Pair
    folder: Path
    connector: str = ""

    @property
    def url(self) -> str:
        """The router: where clients send requests."""
        return self.pair.router_url

    @property
    def runtime_dir(self) -> Path:
        """The runtime folder of the pair's node agent."""
        return Path(runtime_environment(self.folder)[ENV_RUNTIME_DIR])

    @property
    def damage_file(self) -> Path:
        """While this exists, a "corrupting" pair damages what D receives."""
        return self.folder / DAMAGE_FILE

    def snapshot(self) -> Snapshot:
        """Ask the node agent for all that it knows."""
        return asyncio.run(_snapshot(RuntimePaths.at(self.runtime_dir).view))

    def instances(self) -> dict[str, Instance]:
        """Return the node agent's instances by role."""
        return {instance.role: instance for instance in self.snapshot().instances}

    def nixl_counters(self) -> NixlCounters:
        """Read vLLM's own counters."""
        both = [_samples(server) for server in self.pair.servers]

        def total(name: str) -> int:
            return round(sum(samples.get(f"vllm:nixl_{name}", 0.0) for samples in both))

        return NixlCounters(
            transfers=total("bytes_transferred_count"),
            bytes=total("bytes_transferred_sum"),
            descriptors=total("num_descriptors_sum"),
            failed=total("num_failed_transfers_total"),
        )


async def _snapshot(socket: Path) -> Snapshot:
    async with await connect_unix(socket) as agent:
        return await agent.snapshot(finished=100_000)


def _samples(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=10.0).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:nixl_") and not sample.name.endswith("_bucket")
    }


@contextmanager
def running_pair(connector: str) -> Iterator[RunningPair]:
    """Run a pair with one of `CONNECTORS`, and its router, on processes of its own.

    `P+D` gives each side a connector of its own.
    """
    with Processes() as processes:
        model = make_model(processes.folder / "model")
        yield start_in(processes, connector, model, prefix="")


def start_in(
    processes: Processes,
    connector: str,
    model: Path,
    *,
    prefix: str,
    settings: Mapping[str, str] | None = None,
) -> RunningPair:
    """Start a pair and its router among `processes`; `prefix` tells several pairs' processes apart.

    `settings` are further environment variables of the servers.
    """
    folder = processes.folder / prefix
    folder.mkdir(exist_ok=True)
    env = {**environment_of(folder), **(settings or {})}
    prefill, _, decode = connector.partition("+")
    pair = start_pair(
        processes,
        free_ports(),
        model,
        CONNECTORS[prefill],
        decode_connector=CONNECTORS[decode] if decode else None,
        env=env,
        prefix=prefix,
    )
    return RunningPair(processes, pair, folder, connector)


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment variables of a pair's servers."""
    return {
        **runtime_environment(folder),
        DAMAGE_WHILE: str(folder / DAMAGE_FILE),
        "PYTHONPATH": str(REPOSITORY),
    }


def kill(pair: RunningPair, role: Role) -> None:
    """Kill an instance's processes, as the kernel does when memory runs out."""
    engines = [psutil.Process(pid) for pid in pair.instances()[role].pids]
    for engine in engines:
        engine.kill()
    psutil.wait_procs(engines, timeout=10)


def start_again(pair: RunningPair, role: Role) -> None:
    """Start another engine on the address of the one that died."""
    dead: Server = getattr(pair.pair, role)
    again = Server(f"{dead.name}-again", dead.port, role, dead.side_channel)
    connector, model = CONNECTORS[pair.connector], pair.processes.folder / "model"
    start_server(pair.processes, again, model, connector, environment_of(pair.folder))
    wait_healthy(pair.processes, {again.name: f"{again.url}/health"}, timeout_s=START_TIMEOUT_S)


@contextmanager
def running_alone() -> Iterator[Server]:
    """Run one server without disaggregation."""
    with Processes() as processes:
        yield start_alone(processes, free_ports().http(0), make_model(processes.folder / "model"))
