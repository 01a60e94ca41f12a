"""Handshakes that are slow or time out, leases that end first, and leases that must not end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtop.agents.act import Command
from kvtop.agents.model import Transfer
from kvtop.console.demo.load import Prompt, make_prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.processes import Processes
from kvtop.console.demo.servers import Server
from tests.chaos.storm import act, idle
from tests.support.pair import SHORT_LEASE_S, RunningPair, complete, start_in
from tests.support.relayed import RELAY_PORT, Relay
from tests.support.two_steps import Handed, decode, decode_and_leave, prefill
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", [None], indirect=True)]

HANDSHAKE_TIMEOUT_S = 5.0
"""vLLM's own."""


@dataclass(frozen=True)
class RelayedPair:
    """A pair, and the relay through which P shakes hands with D."""

    running: RunningPair
    relay: Relay

    @property
    def prefill(self) -> Server:
        return self.running.pair.prefill

    @property
    def decode(self) -> Server:
        return self.running.pair.decode

    def part(self) -> None:
        """Have P forget D, so that the next push begins with a handshake."""
        engines = self.running.instances()
        command = Command(
            verb="evict",
            targets=[engines["prefill"].engine_id],
            arguments={"peer": engines["decode"].engine_id},
        )
        outcome = asyncio.run(act(self.running, command))
        assert outcome.state == "done", outcome.message

    def times(self, handed: Handed) -> dict[str, int]:
        """When the ledger's row of a request reached which step; empty while there is no row."""
        row = self.row(handed)
        return {str(step): at_ns for step, at_ns in row.times_ns.items()} if row else {}

    def stage(self, handed: Handed) -> str | None:
        """The stage of the ledger's row of a request."""
        row = self.row(handed)
        return row.stage if row else None

    def row(self, handed: Handed) -> Transfer | None:
        """The ledger's row of a request, None while there is none."""
        rows = [
            row
            for row in self.running.snapshot().transfers
            for side in (row.prefill, row.decode)
            if side and handed.request_id in (side.request_id or "")
        ]
        return rows[-1] if rows else None


@pytest.fixture(scope="module")
def relayed() -> Iterator[RelayedPair]:
    relay = Relay()
    with Processes() as processes:
        model = make_model(processes.folder / "model")
        settings = {RELAY_PORT: str(relay.port)}
        running = start_in(processes, "kvtop-relayed", model, prefix="", settings=settings)
        relay.target_port = running.pair.decode.side_channel
        pair = RelayedPair(running, relay)
        decode(pair.decode, prefill(pair.prefill, make_prompt(1, random.Random(1))))  # both have met
        yield pair
    relay.close()


@pytest.fixture(autouse=True)
def nothing_is_left(relayed: RelayedPair) -> Iterator[None]:
    yield
    wait_until(lambda: idle(relayed.running), "both engines' KV use to be 0", timeout_s=60)


def test_a_handshake_that_times_out_is_said_and_tried_again(
    pair: None, relayed: RelayedPair, aggregated: Server
) -> None:
    prompt = make_prompt(2, random.Random(2))
    expected = complete(aggregated.url, prompt)
    relayed.part()
    held = prefill(relayed.prefill, prompt)

    with ThreadPoolExecutor(1) as background:
        with relayed.relay.held_up():
            asked = background.submit(decode, relayed.decode, held)
            wait_until(
                lambda: any("timed out" in each for each in _reasons(relayed)),
                "the pair's state to say that the handshake timed out",
                timeout_s=HANDSHAKE_TIMEOUT_S + 5,
            )
        assert asked.result() == expected
    wait_until(lambda: "done" in relayed.times(held), "the KV to have come all the same")


def test_nothing_is_written_after_the_lease_whose_blocks_others_have(
    pair: None, relayed: RelayedPair, aggregated: Server
) -> None:
    """P's lease ends while the handshake is held up, and its blocks are computed anew for others."""
    prompt = make_prompt(3, random.Random(3))
    expected = complete(aggregated.url, prompt)
    relayed.part()
    written = relayed.running.nixl_counters()
    # D's heartbeats name a request that P has not: nothing renews this lease.
    held = prefill(relayed.prefill, prompt).but(remote_request_id="another")

    with ThreadPoolExecutor(1) as background:
        with relayed.relay.held_up():
            asked = background.submit(decode, relayed.decode, held)
            wait_until(
                lambda: "expired" in relayed.times(held),
                "the lease to end",
                timeout_s=SHORT_LEASE_S + 5,
            )
            for number in range(3):
                complete(relayed.prefill.url, make_prompt(100 + number, random.Random(number)))
            opened = time.monotonic()
        assert asked.result() == expected
    assert time.monotonic() - opened < HANDSHAKE_TIMEOUT_S, "D was to be told as soon as it could be"
    assert relayed.running.nixl_counters().since(written).transfers == 0
    assert relayed.stage(held) in ("expired", "failed")


def test_a_lease_is_renewed_for_as_long_as_d_cannot_allocate(
    pair: None, relayed: RelayedPair, aggregated: Server
) -> None:
    """D runs one request at a time; P's and D's request ids differ in vLLM's random suffix."""
    prompt = make_prompt(4, random.Random(4))
    expected = complete(aggregated.url, prompt)
    busy = Handed(Prompt("occupied", 4000))
    before = _tokens_made(relayed.decode)

    with ThreadPoolExecutor(2) as background:
        occupied = background.submit(decode_and_leave, relayed.decode, busy, after_s=3.5 * SHORT_LEASE_S)
        wait_until(lambda: _tokens_made(relayed.decode) > before + 20, "D to be occupied")
        held = prefill(relayed.prefill, prompt)
        answer = decode(relayed.decode, held)
        occupied.result()

    assert answer == expected
    wait_until(lambda: relayed.stage(held) == "done", "the transfer to be done")
    times = relayed.times(held)
    assert times["allocated"] - times["queued"] > 3e9 * SHORT_LEASE_S, "D was to wait for three leases"


def _reasons(relayed: RelayedPair) -> list[str]:
    return [each.reason for each in relayed.running.instances()["prefill"].pairs]


def _tokens_made(server: Server) -> float:
    """Ask vLLM itself: its stat logger is silent for a connector of another name."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(float(sample.value) for sample in samples if sample.name == "vllm:generation_tokens_total")
