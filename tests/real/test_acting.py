"""An operator acts on a real pair, idle and under load, and costs no request its right answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvtop.console.demo.servers import Server
from tests.support.pair import Load, RunningPair, complete_all, prompts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("pair", ["kvtop-push"], indirect=True)]


def act(pair: RunningPair, *arguments: str) -> dict[str, Any]:
    """Run `kvtop-agent … --json` on the pair's node."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtop.agents.cli", *arguments, "--json"],
        env={**os.environ, "KVTOP_RUNTIME_DIR": str(pair.runtime_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode
    assert document["audited"], document["audit_problem"]
    return document


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_running_pair_switches_and_that_is_proved_by_a_transfer(
    pair: RunningPair, aggregated: Server, mode: str
) -> None:
    asked = prompts(40, seed=60)
    with Load(pair.url, asked, in_flight=2) as load:
        wait_until(lambda: load.finished >= 1, "the load", timeout_s=60)
        outcome = act(pair, "mode", "prefill-0", mode, "--wait", "--timeout", "60s")
        outputs = load.results()

    assert outcome["state"] == "done", outcome["message"]
    proof = next(row for row in pair.snapshot().transfers if row.id == outcome["facts"]["proved_by_transfer"])
    assert (proof.direction, proof.stage) == (mode, "done"), proof
    assert outputs == complete_all(aggregated.url, asked)


def test_an_idle_pair_obeys_at_once(pair: RunningPair) -> None:
    outcomes = [
        act(pair, *arguments)
        for arguments in (
            ("mode", "prefill-0", "pull"),
            ("mode", "prefill-0", "push"),
            ("drain", "decode-0", "--wait", "--force"),
            ("undrain", "decode-0"),
        )
    ]

    assert [each["state"] for each in outcomes] == ["done"] * 4, [each["message"] for each in outcomes]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_drain_under_load_ends_and_requests_are_served_without_a_transfer(
    pair: RunningPair, aggregated: Server, name: str
) -> None:
    asked = prompts(24, seed=61)
    later = prompts(4, seed=62)
    with Load(pair.url, asked, in_flight=4) as load:
        wait_until(lambda: load.finished >= 4, "the load", timeout_s=60)
        drained = act(pair, "drain", name, "--wait", "--timeout", "60s", "--force")
        outputs = load.results()
    known = {row.id for row in pair.snapshot().transfers}
    without = complete_all(pair.url, later)
    moved = [row for row in pair.snapshot().transfers if row.id not in known and row.bytes]
    undrained = act(pair, "undrain", name)

    assert (drained["state"], undrained["state"]) == ("done", "done"), drained["message"]
    assert drained["targets"][0]["after"]["state"] == "drained"
    assert "; new requests are still taken: the admission middleware is not loaded (" in drained["message"]
    assert moved == []
    assert outputs == complete_all(aggregated.url, asked)
    assert without == complete_all(aggregated.url, later)


def test_an_evicted_peer_is_met_afresh(pair: RunningPair, aggregated: Server) -> None:
    asked = prompts(4, seed=63)
    before = complete_all(pair.url, asked[:2])

    evicted = act(pair, "evict", "prefill-0", "decode-0")
    after = complete_all(pair.url, asked[2:])

    assert evicted["state"] == "done", evicted["message"]
    assert before + after == complete_all(aggregated.url, asked)
