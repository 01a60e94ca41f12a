"""What is said of an instance beside its figures: its quarantine, and the peers that it cannot meet."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtop.agents.events import PairReport
from kvtop.agents.model import Instance, Snapshot
from kvtop.agents.remarks import remarks
from kvtop.agents.reports import as_json, as_table
from kvtop.agents.server import Agent
from kvtop.agents.wire import Clock

S = 1_000_000_000
NOW_NS = 9000 * S
NAMES = {"engine-of-decode-0": "decode-0", "engine-of-decode-1": "decode-1"}


def test_of_an_instance_that_is_well_nothing_is_said() -> None:
    assert said(quarantined_blocks=0, pairs=[pair("decode-0", "ready"), pair("decode-1", "evicted")]) == []
    assert said(quarantined_blocks=None) == []


def test_a_quarantine_says_how_many_blocks_and_since_when() -> None:
    assert said(quarantined_blocks=12, quarantined_since_ns=NOW_NS - 64 * S) == [
        "quarantine: 12 blocks, the oldest for 1m04s"
    ]
    assert said(quarantined_blocks=1) == ["quarantine: 1 block, the oldest for –"]


def test_a_failed_pair_says_with_whom_and_why() -> None:
    assert said(pairs=[pair("decode-0", reason="handshake timed out: the peer hangs", ago_s=12)]) == [
        "pair decode-0: handshake timed out: the peer hangs (12s ago)"
    ]
    assert said(pairs=[pair("elsewhere")]) == ["pair engine-of-elsewhere: failed (0s ago)"]


def test_of_many_failed_pairs_the_latest_are_told_and_the_others_counted() -> None:
    pairs = [pair(f"p{number}", ago_s=number) for number in (5, 1, 4, 2, 3)]

    assert said(pairs=pairs) == [
        "pair engine-of-p1: failed (1s ago)",
        "pair engine-of-p2 and 3 more (status --json): failed (2s ago)",
    ]


def test_a_failure_that_nobody_has_met_again_for_an_hour_is_left_to_the_json() -> None:
    old = pair("decode-0", ago_s=3601, reason="the peer is gone")

    assert said(pairs=[old]) == []
    assert "the peer is gone" in as_json("status", snapshot(instance(pairs=[old])))


def test_status_on_the_node_tells_the_same_below_its_table() -> None:
    decode = instance(engine_id="engine-of-decode-0", name="decode-0", role="decode")
    troubled = instance(
        quarantined_blocks=3,
        quarantined_since_ns=NOW_NS - 5 * S,
        pairs=[pair("decode-0", reason="\x1b[2Jthe peer hangs " + "x" * 200, ago_s=2)],
    )

    *table, quarantine, failed = as_table("status", snapshot(decode, troubled)).splitlines()

    assert [line.split()[0] for line in table] == ["INSTANCE", "decode-0", "prefill-0"]
    assert quarantine == "prefill-0: quarantine: 3 blocks, the oldest for 5s"
    assert failed == f"prefill-0: pair decode-0: \ufffd[2Jthe peer hangs {'x' * 200} (2s ago)"


def said(**facts: Any) -> list[str]:
    """The lines about an instance of which these facts hold."""

    def age_s(stamp_ns: int | None) -> float | None:
        return None if stamp_ns is None else (NOW_NS - stamp_ns) / S

    told = remarks(instance(**facts), lambda engine_id: NAMES.get(engine_id, engine_id), age_s)
    return [remark.text(age_s) for remark in told]


def instance(**facts: Any) -> Instance:
    known = {"engine_id": "e", "name": "prefill-0", "role": "prefill", "mode": "push", "state": "serving"}
    return Instance(**{**known, "state_since_ns": 1, **facts})


def pair(name: str, state: Any = "failed", *, reason: str = "", ago_s: int = 0) -> PairReport:
    return PairReport(f"engine-of-{name}", state, NOW_NS - ago_s * S, reason)


def snapshot(*instances: Instance) -> Snapshot:
    node = msgspec.structs.replace(Agent().node(), clock=Clock(NOW_NS, 1))
    return Snapshot(node=node, instances=list(instances))
