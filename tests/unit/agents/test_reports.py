"""What `kvtop-agent` prints shows names and errors as they are, and lets none of them act on the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from kvtop.agents.facts import Exit, Host
from kvtop.agents.model import Instance, Snapshot, Transfer
from kvtop.agents.reports import as_table
from kvtop.agents.server import Agent


@pytest.mark.parametrize("error", ["NIXL [backend] refused", "closed by [/peer]", "of pod :warning:"])
def test_an_error_is_printed_as_it_is(error: str) -> None:
    assert error in printed(error)


@pytest.mark.parametrize("error", ["\x1b[2Jgone", "a\rb", "a\nb", "\x9b2J", "\x07"])
def test_no_control_character_reaches_the_terminal(error: str) -> None:
    assert [c for c in printed(error) if not c.isprintable() and c != "\n"] == []
    assert len(printed(error).splitlines()) == 2


def printed(error: str) -> str:
    row = Transfer(id=1, stage="failed", stage_since_ns=1, first_seen_ns=1, error=error)
    return as_table("transfers", Snapshot(node=Agent().node(), transfers=[row]))


def test_the_status_says_how_the_node_fares_who_is_silent_and_what_a_dead_engine_logged_last() -> None:
    node = Agent().node()
    host = Host(
        sampled_ns=1, cores=8, cpu_percent=25.0, memory_total_bytes=4 << 30, memory_available_bytes=1 << 30
    )
    died = Exit(
        process="worker (pid 7)",
        pid=7,
        at_ns=1,
        in_order=False,
        log_lines=[f"ERROR line {n} \x1b[2J" for n in range(9)],
    )
    common: dict[str, Any] = {"role": "prefill", "mode": "push", "state_since_ns": node.clock.monotonic_ns}
    stale = Instance(
        engine_id="a", name="a", state="stale", state_reason="worker (pid 7) is stopped", **common
    )
    down = Instance(engine_id="b", name="b", state="down", exit=died, **common)

    text = as_table("status", Snapshot(node=node, instances=[stale, down], host=host))

    assert "node: CPU 25 % of 8 cores, load –, memory 75% of 4 GiB, disk –, up –" in text
    assert "stale (not reporting since " in text
    assert ": worker (pid 7) is stopped)" in text
    assert text.endswith("    ERROR line 8 \N{REPLACEMENT CHARACTER}[2J")
    assert "ERROR line 3" not in text
