"""The ledger joins what P and D report into one row, whatever the order in which the reports arrive."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.agents.events import Direction, Side, TransferEvent
from kvtop.agents.latency import NS
from kvtop.agents.ledger import MOST_ASIDE, Ledger
from kvtop.agents.model import LIVE_STAGES, Transfer

P, D = "engine-p", "engine-d"
P_ID, D_ID = "cmpl-x-0-0000aaaa", "cmpl-x-0-1111bbbb"


def event(at_ns: int, side: Side, step: Any, **facts: Any) -> TransferEvent:
    request_id = P_ID if side == "prefill" else D_ID
    return TransferEvent(at_ns=at_ns, side=side, request_id=request_id, step=step, **facts)


def of_p(at_ns: int, step: Any, **facts: Any) -> tuple[str, TransferEvent]:
    return P, event(at_ns, "prefill", step, **facts)


def of_d(at_ns: int, step: Any, **facts: Any) -> tuple[str, TransferEvent]:
    return D, event(at_ns, "decode", step, **facts)


def of_request(request_id: str, step: Any, **facts: Any) -> TransferEvent:
    return TransferEvent(at_ns=1, side="prefill", request_id=request_id, step=step, **facts)


D_KNOWS_P = {"peer_engine_id": P, "peer_request_id": P_ID}
P_KNOWS_D = {"peer_engine_id": D, "peer_request_id": D_ID}
FIGURES: dict[str, Any] = {
    "bytes": 4096,
    "descriptors": 3,
    "post_us": 10.0,
    "wire_us": 50.0,
    "ranks_expected": 1,
}

PUSH_P = [
    of_p(20, "queued", direction="push", blocks=7, lease_deadline_ns=900),
    of_p(50, "matched", **P_KNOWS_D),
    of_p(51, "handshaking"),
    of_p(60, "posting"),
    of_p(70, "on_wire"),
    of_p(90, "done", **FIGURES),
    of_p(95, "released"),
]
PUSH_D = [
    of_d(10, "queued", direction="push", **D_KNOWS_P),
    of_d(30, "allocated"),
    of_d(40, "registered"),
    of_d(92, "received"),
]
PULL_P = [
    of_p(20, "queued", direction="pull", blocks=7, lease_deadline_ns=900),
    of_p(95, "released"),
]
PULL_D = [
    of_d(30, "queued", direction="pull", **D_KNOWS_P),
    of_d(40, "allocated"),
    of_d(50, "matched"),
    of_d(60, "posting"),
    of_d(70, "on_wire"),
    of_d(90, "done", **FIGURES),
    of_d(92, "received"),
]


def ledger_of(events: list[tuple[str, TransferEvent]], **options: Any) -> Ledger:
    ledger = Ledger(**options)
    for engine_id, each in events:
        ledger.apply(engine_id, each)
    return ledger


def only_row(ledger: Ledger) -> Transfer:
    (row,) = ledger.snapshot(100)
    return row


@st.composite
def interleaved(draw: st.DrawFn, one: list[Any], other: list[Any]) -> list[Any]:
    """Both lists' events, each list in its own order, as two connections deliver them."""
    one, other, mixed = list(one), list(other), []
    while one or other:
        take_one = draw(st.booleans()) if one and other else bool(one)
        mixed.append((one if take_one else other).pop(0))
    return mixed


@given(interleaved(PUSH_P, PUSH_D))
def test_a_push_is_the_same_row_however_the_two_sides_reports_interleave(events: list[Any]) -> None:
    row = only_row(ledger_of(events))

    assert (row.stage, row.direction, row.stage_since_ns, row.first_seen_ns) == ("done", "push", 90, 10)
    assert row.prefill is not None
    assert row.decode is not None
    assert (row.prefill.request_id, row.decode.request_id) == (P_ID, D_ID)
    assert (row.blocks, row.bytes, row.descriptors, row.post_us, row.wire_us) == (7, 4096, 3, 10.0, 50.0)
    assert (row.ranks_done, row.ranks_expected, row.lease_deadline_ns) == (1, 1, 900)
    assert row.times_ns == {
        "queued": 10, "allocated": 30, "registered": 40, "matched": 50, "handshaking": 51,
        "posting": 60, "on_wire": 70, "done": 90, "received": 92, "released": 95,
    }  # fmt: skip


@given(interleaved(PULL_P, PULL_D))
def test_a_pull_is_the_same_row_however_the_two_sides_reports_interleave(events: list[Any]) -> None:
    row = only_row(ledger_of(events))

    assert (row.stage, row.direction, row.bytes) == ("done", "pull", 4096)
    assert row.times_ns["received"] == 92


@given(interleaved(PUSH_P, PUSH_D), st.integers(0, 10))
def test_the_counts_of_both_engines_follow_the_row_at_every_step(events: list[Any], upto: int) -> None:
    ledger = ledger_of(events[: upto + 1])
    rows = ledger.snapshot(100)

    for engine_id in (P, D):
        mine = [
            r
            for r in rows
            if engine_id in (r.prefill and r.prefill.engine_id, r.decode and r.decode.engine_id)
        ]
        tally = ledger.tallies.get(engine_id)
        assert (tally.done if tally else 0) == sum(r.stage == "done" for r in mine)
        assert sum(tally.depths.values() if tally else ()) == sum(r.stage != "done" for r in mine)
        assert set(tally.live if tally else ()) == {r.id for r in mine if r.stage != "done"}
    assert (ledger.total.done, len(ledger.total.live)) == (
        sum(row.stage == "done" for row in rows),
        sum(row.stage != "done" for row in rows),
    )


def test_a_router_that_dispatches_both_sides_at_once_gives_one_row_too() -> None:
    """Then D cannot know P's request id; the ids differ in vLLM's random suffix only."""
    guess = {"peer_engine_id": P, "peer_request_id": "x"}
    ledger = ledger_of([of_d(10, "queued", direction="push", **guess), *PUSH_P, *PUSH_D[1:]])

    assert only_row(ledger).stage == "done"


@given(st.permutations(range(6)))
def test_the_direction_is_the_one_that_was_taken_not_the_one_that_a_side_expected(order: list[int]) -> None:
    """A registration that came while P had pinned the request to pull is served as a push all the same."""
    events = [
        of_p(20, "queued", direction="pull"),
        of_d(10, "queued", direction="push", **D_KNOWS_P),
        of_d(40, "registered", direction="push"),
        of_p(90, "done", direction="push", **FIGURES),
        of_p(95, "released", direction="pull"),
        of_d(96, "received", direction="push"),
    ]
    ledger = Ledger()
    for position in order:
        ledger.apply(*events[position])

    (row,) = ledger.snapshot(10)
    assert (row.stage, row.direction) == ("done", "push")


def test_two_requests_whose_ids_share_a_base_are_joined_when_p_matches_them() -> None:
    """Two rows begin apart, under ids that tell nothing; the match says that they are one transfer."""
    odd = TransferEvent(at_ns=5, side="decode", request_id="of-d", step="queued", direction="push")
    match = TransferEvent(
        at_ns=9, side="prefill", request_id="of-p", step="matched", peer_engine_id=D, peer_request_id="of-d"
    )
    ledger = Ledger()
    ledger.apply(D, odd)
    ledger.apply(P, of_request("of-p", "queued"))
    before = ledger.version
    assert len(ledger.snapshot(9)) == 2

    ledger.apply(P, match)

    row = only_row(ledger)
    changed, forgotten = ledger.changes(before)
    assert [each.id for each in changed] == [row.id] == [1]
    assert forgotten == [2]


@pytest.mark.parametrize(
    ("named", "reports"), [((P, "x"), (P, "x")), (("another P", P_ID), ("another P", P_ID))]
)
def test_a_request_that_was_named_as_a_peer_by_mistake_is_a_transfer_of_its_own(
    named: tuple[str, str], reports: tuple[str, str]
) -> None:
    """D names a peer that it only expects; P answers under other ids, which settles whose row it is."""
    guess = {"peer_engine_id": named[0], "peer_request_id": named[1]}
    ledger = ledger_of(
        [of_d(10, "queued", direction="push", **guess), of_d(11, "allocated", **D_KNOWS_P), *PUSH_P]
    )

    ledger.apply(reports[0], of_request(reports[1], "queued"))

    assert [
        row.prefill and (row.prefill.engine_id, row.prefill.request_id) for row in ledger.snapshot(9)
    ] == [
        (P, P_ID),
        reports,
    ]


def test_the_same_ids_on_another_engine_are_another_transfer() -> None:
    elsewhere = {"peer_engine_id": "another-p", "peer_request_id": P_ID}
    ledger = ledger_of([of_d(10, "queued", direction="push", **elsewhere), *PUSH_P[:1]])

    assert len(ledger.snapshot(9)) == 2


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_all_ranks_of_the_initiator_must_be_done(direction: Direction) -> None:
    initiator = of_p if direction == "push" else of_d
    first = initiator(50, "done", direction=direction, rank=0, **{**FIGURES, "ranks_expected": 2})
    second = initiator(
        60, "done", direction=direction, rank=1, **{**FIGURES, "ranks_expected": 2, "wire_us": 80.0}
    )
    ledger = ledger_of([initiator(40, "on_wire", direction=direction), first])
    assert (only_row(ledger).stage, only_row(ledger).ranks_done) == ("on_wire", 1)

    ledger.apply(*second)

    row = only_row(ledger)
    assert (row.stage, row.stage_since_ns, row.bytes, row.descriptors, row.wire_us) == (
        "done",
        60,
        8192,
        6,
        80.0,
    )


@pytest.mark.parametrize("impossible", [0, -1, -(1 << 63)])
def test_a_number_of_ranks_that_cannot_be_completes_nothing(impossible: int) -> None:
    ledger = Ledger()
    ledger.apply(*of_p(1, "matched", ranks_expected=impossible))
    assert [row.stage for row in ledger.snapshot(10)] == ["matched"]

    ledger.apply(*of_p(2, "done", bytes=1))
    assert [row.stage for row in ledger.snapshot(10)] == ["done"]


@given(st.permutations(["done", "failed", "expired"]))
def test_a_transfer_that_failed_in_any_way_is_never_shown_as_done(order: list[str]) -> None:
    facts: dict[str, dict[str, Any]] = {
        "done": FIGURES,
        "failed": {"error_class": "transport", "error": "broken"},
        "expired": {"error_class": "expiry"},
    }
    row = only_row(ledger_of([of_p(10, step, direction="push", **facts[step]) for step in order]))

    assert (row.stage, row.error_class, row.error) == ("failed", "transport", "broken")
    assert row.bytes == 4096


def test_an_arrival_alone_completes_a_row_whose_initiator_reports_elsewhere_with_unknown_bytes() -> None:
    ledger = ledger_of(PUSH_D, attached=lambda engine_id: engine_id == D)

    row = only_row(ledger)
    assert (row.stage, row.bytes, row.descriptors) == ("done", None, None)


def test_an_arrival_does_not_complete_a_row_whose_initiator_reports_here() -> None:
    assert only_row(ledger_of([*PUSH_P[:5], *PUSH_D])).stage == "on_wire"


@pytest.mark.parametrize("mark", [of_d(92, "received"), of_p(95, "released")])
def test_a_row_whose_completion_was_lost_with_an_agent_is_closed_with_unknown_bytes(mark: Any) -> None:
    """A new agent may hear of a transfer's end only; such a row must not look stuck for ever."""
    ledger = ledger_of([mark])
    ledger.close_overdue(NS)
    assert only_row(ledger).stage == "queued"

    ledger.close_overdue(6 * NS)

    row = only_row(ledger)
    assert (row.stage, row.bytes, row.ranks_done) == ("done", None, 0)
    assert ledger.tallies[mark[0]].done == 1


def test_a_lost_completion_is_closed_also_where_the_two_sides_were_joined_after_the_arrival() -> None:
    ledger = Ledger()
    ledger.apply(P, of_request("of-p", "queued"))
    for step in ("queued", "received"):
        ledger.apply(D, TransferEvent(at_ns=2, side="decode", request_id="of-d", step=step))
    match: dict[str, Any] = {"peer_engine_id": D, "peer_request_id": "of-d"}
    ledger.apply(P, TransferEvent(at_ns=3, side="prefill", request_id="of-p", step="matched", **match))
    assert only_row(ledger).stage == "matched"

    ledger.close_overdue(60 * NS)

    assert only_row(ledger).stage == "done"


@given(interleaved(PUSH_P, PUSH_D), interleaved(PULL_P, PULL_D), st.integers(0, 20))
def test_the_oldest_live_transfer_is_the_one_that_was_seen_first(one: Any, other: Any, upto: int) -> None:
    later = [
        (
            e,
            msgspec.structs.replace(
                each,
                request_id=f"{each.side}-2",
                at_ns=each.at_ns + 15,
                peer_request_id=each.peer_request_id and "prefill-2",
            ),
        )
        for e, each in other
    ]
    mixed = [pair for both in zip_longest(one, later) for pair in both if pair]
    ledger = ledger_of(mixed[:upto])
    live = [row for row in ledger.snapshot(100) if row.stage in LIVE_STAGES]

    for engine_id in (P, D):
        mine = [
            r.first_seen_ns
            for r in live
            if engine_id in (r.prefill and r.prefill.engine_id, r.decode and r.decode.engine_id)
        ]
        assert ledger.oldest_live_ns(engine_id) == min(mine, default=None)


def test_sums_that_no_message_can_carry_are_held_within_what_one_can() -> None:
    huge = {**FIGURES, "bytes": (1 << 63) - 1, "ranks_expected": 3}
    row = only_row(ledger_of([of_p(9, "done", direction="push", rank=rank, **huge) for rank in range(3)]))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=Transfer) == row


def test_a_completion_in_time_is_not_closed_over() -> None:
    ledger = ledger_of([*PUSH_P, *PUSH_D])
    ledger.close_overdue(60 * NS)
    assert only_row(ledger).bytes == 4096


def test_an_engine_that_is_gone_ends_its_live_transfers_and_no_others() -> None:
    ledger = ledger_of([*PUSH_P, *PUSH_D])
    ledger.apply(P, of_request("live", "queued"))
    ledger.apply("other", of_request("theirs", "queued"))

    ledger.engine_gone(P, 120, "prefill-0 went away")

    done, live, theirs = ledger.snapshot(100)
    assert (done.stage, theirs.stage) == ("done", "queued")
    assert (live.stage, live.error_class, live.error) == ("failed", "transport", "prefill-0 went away")


def test_finished_rows_leave_the_ring_oldest_first_and_live_rows_never_do() -> None:
    ledger = Ledger(finished_kept=3)
    ledger.apply(P, TransferEvent(at_ns=1, side="prefill", request_id="live", step="queued"))
    for number in range(5):
        ledger.apply(
            P, TransferEvent(at_ns=2, side="prefill", request_id=f"r{number}", step="done", **FIGURES)
        )

    assert [row.id for row in ledger.snapshot(100)] == [1, 4, 5, 6]
    assert ledger.changes(0)[1] == [3, 2]
    assert ledger.tallies[P].done == 5
    assert [row.id for row in ledger.snapshot(1)] == [1, 6]


def test_a_delta_holds_what_changed_and_nothing_else() -> None:
    ledger = ledger_of(
        [*PUSH_P[:1], (P, TransferEvent(at_ns=3, side="prefill", request_id="b", step="queued"))]
    )
    version = ledger.version
    assert ledger.changes(version) == ([], [])

    ledger.apply(*PUSH_P[1])

    assert [(row.id, row.stage) for row in ledger.changes(version)[0]] == [(1, "matched")]


def test_a_quarantine_shows_what_it_follows_from_and_gives_way_to_it_once_settled() -> None:
    ended = [
        of_d(30, "allocated", direction="push", **D_KNOWS_P),
        of_d(50, "failed", error_class="expiry", error="the KV did not arrive"),
        of_d(51, "quarantined"),
    ]

    row = only_row(ledger_of(ended))
    assert (row.stage, row.error_class, row.error) == ("quarantined", "expiry", "the KV did not arrive")

    row = only_row(ledger_of([*ended, of_d(90, "settled")]))
    assert (row.stage, row.error_class, row.error) == ("failed", "expiry", "the KV did not arrive")


READ_BACK = [
    (D, TransferEvent(at_ns=1, side="prefill", request_id="cmpl-first-0-00000001", step="queued")),
    (
        P,
        TransferEvent(
            at_ns=2,
            side="decode",
            request_id=P_ID,
            step="queued",
            direction="pull",
            peer_engine_id=D,
            peer_request_id="cmpl-first-0-00000001",
        ),
    ),
    (P, TransferEvent(at_ns=3, side="decode", request_id=P_ID, step="matched", direction="pull")),
    (P, TransferEvent(at_ns=4, side="decode", request_id=P_ID, step="done", direction="pull", bytes=64)),
]


@given(st.permutations(READ_BACK + PUSH_P + PUSH_D))
def test_a_prompt_may_itself_be_computed_from_kv_that_is_read_back(
    events: list[tuple[str, TransferEvent]],
) -> None:
    ledger = Ledger()
    for engine_id, each in events:
        ledger.apply(engine_id, each)

    rows = [
        (row.stage, row.direction, row.prefill and row.prefill.engine_id, row.decode and row.decode.engine_id)
        for row in ledger.snapshot(finished=10)
    ]
    assert sorted(rows, key=str) == [("done", "pull", D, P), ("done", "push", P, D)]


def test_what_waits_to_be_joined_is_bounded_also_where_nobody_asks() -> None:
    done: list[int] = []
    ledger = Ledger(completed=lambda row: done.append(row.id))
    for number in range(2 * MOST_ASIDE):
        ledger.apply(
            P, TransferEvent(at_ns=2, side="prefill", request_id=f"r{number}", step="done", **FIGURES)
        )

    assert MOST_ASIDE <= len(done) <= 2 * MOST_ASIDE
