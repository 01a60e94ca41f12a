"""What the screens say, tested as text: no terminal is needed."""

import json
from collections.abc import Iterable
from typing import get_args

from kvtop.agents.events import PairReport
from kvtop.agents.facts import BucketedLatency, Buckets, KvCounters
from kvtop.agents.model import Gap, InstanceState
from kvtop.console.fleet.figures import fleet_figures
from kvtop.console.fleet.state import FleetState, LinkState, NodeState
from kvtop.console.once import as_json
from kvtop.console.views import fleet_columns, transfer_columns
from kvtop.console.views.detail import detail
from kvtop.console.views.fleet_rows import STATE_MARKS, fleet_rows
from kvtop.console.views.header import header, notices
from kvtop.console.views.help import help_lines
from kvtop.console.views.histogram import Scope, histogram
from kvtop.console.views.table import Cell, Sort, plain_lines
from kvtop.console.views.transfer_rows import TransferRow, backlog, empty_lines, summary, transfer_rows
from tests.unit.console.samples import (
    NODE_NOW_NS,
    NOW,
    S,
    instance,
    latency,
    lost,
    node,
    sketch,
    small_fleet,
    transfer,
)


def text(cells: Iterable[Cell]) -> str:
    return "".join(cell.text for cell in cells)


def fleet_lines(fleet: FleetState, sort: Sort | None = None) -> list[str]:
    table = fleet_columns.fleet_table(fleet)
    return plain_lines(table, fleet_rows(fleet, sort, table.columns, NOW), NOW)


def transfer_lines(fleet: FleetState, sort: Sort | None = None) -> list[str]:
    table = transfer_columns.transfer_table(fleet)
    return plain_lines(table, transfer_rows(fleet, sort, table.columns, NOW), NOW)


def only(lines: Iterable[str], part: str) -> str:
    (found,) = [line for line in lines if part in line]
    return found


# Fleet


def test_what_is_unknown_reads_as_a_dash_and_never_as_0() -> None:
    lines = fleet_lines(FleetState([node("p01", [instance("prefill-0")])]))
    row = only(lines, "prefill-0")
    assert "–/–" in row
    assert " 0/0" not in row
    assert " 0%" not in row
    assert "0B" not in row


def test_a_down_instance_stays_in_place_with_since_when_and_why() -> None:
    down = instance(
        "prefill-0", state="down", state_since_ns=NODE_NOW_NS - 124 * S, state_reason="pid 7 was killed"
    )
    lines = fleet_lines(FleetState([node("p01", [down, instance("decode-0")])]))
    at = lines.index(only(lines, "prefill-0"))
    assert "✗ down" in lines[at]
    assert "(2m04s ago): pid 7 was killed" in lines[at + 1]
    assert "decode-0" in lines[at + 2]


def test_a_stale_instance_says_since_when_it_does_not_report_and_why() -> None:
    stale = instance(state="stale", state_since_ns=NODE_NOW_NS - 9 * S, state_reason="pid 7 is stopped")
    lines = fleet_lines(FleetState([node("p01", [stale])]))
    assert "(9s ago): pid 7 is stopped" in only(lines, "└ not reporting since ")


def test_an_observed_instance_is_marked_and_what_its_metrics_do_not_say_is_a_dash() -> None:
    buckets = BucketedLatency(
        60.0, Buckets([0.25, 1.0], [90, 10, 0], 100, 9.0), Buckets([0.1], [0, 5], 5, 1.0)
    )
    stock = instance(
        "decode-7",
        observed="vLLM /metrics",
        mode=None,
        transfers_done=None,
        running=3,
        waiting=0,
        kv_counters=KvCounters(transfers=9, failed=4),
        latency_buckets=buckets,
    )
    lines = fleet_lines(FleetState([node("p01", [stock])]))
    row = only(lines, "decode-7")
    columns = fleet_columns.fleet_table(FleetState([node("p01", [stock])])).columns
    (seen,) = [r for r in fleet_rows(FleetState([node("p01", [stock])]), None, columns, NOW) if r.instance]
    cells = {column.id: column.cell(seen, NOW).text for column in columns}
    assert "OBS" in row
    assert (cells["role"], cells["load"], cells["failed"]) == ("D –", "3/0", "4")
    assert (cells["live"], cells["depth_on_wire"], cells["sent"], cells["received"]) == ("–",) * 4
    assert (cells["ttft_p50"], cells["ttft_p99"], cells["itl_p50"]) == ("≤250ms", "≤1.00s", "–")


def test_a_draining_instance_says_what_is_left_and_a_drained_one_that_nothing_is() -> None:
    draining = instance("prefill-0", state="draining", state_reason="left: 2 leases, 1 write")
    lines = fleet_lines(FleetState([node("p01", [draining, instance("prefill-1", state="drained")])]))
    at = lines.index(only(lines, "prefill-0"))
    assert "◔ draining" in lines[at]
    assert lines[at + 1] == "  └ draining for 1m00s; left: 2 leases, 1 write"
    assert "○ drained" in lines[at + 2]


def test_an_instance_says_what_is_in_quarantine_and_which_peers_it_cannot_meet() -> None:
    troubled = instance(
        "prefill-0",
        quarantined_blocks=12,
        quarantined_since_ns=NODE_NOW_NS - 64 * S,
        pairs=[
            PairReport(
                "decode-0-engine", "failed", NODE_NOW_NS - 9 * S, "handshake timed out: the peer hangs"
            ),
            PairReport("decode-1-engine", "ready", NODE_NOW_NS),
        ],
    )
    fleet = FleetState([node("p01", [troubled]), node("d01", [instance("decode-0"), instance("decode-1")])])

    lines = fleet_lines(fleet)

    at = lines.index(next(line for line in lines if line.startswith(" prefill-0")))
    assert lines[at + 1 : at + 3] == [
        "  └ ▣ quarantine: 12 blocks, the oldest for 1m04s",
        "  └ ✗ pair decode-0: handshake timed out: the peer hangs (9s ago)",
    ]
    assert "▾ d01" in lines[at + 3]


def test_every_state_has_a_mark_of_its_own() -> None:
    assert STATE_MARKS.keys() == set(get_args(InstanceState))
    assert len({mark.text for mark in STATE_MARKS.values()}) == len(STATE_MARKS)


def test_a_lost_node_stays_in_place_with_since_when_and_why_and_its_last_known_rows() -> None:
    lines = fleet_lines(FleetState([lost("p02", instances=[instance("decode-1")]), node("p03")]))
    at = lines.index(only(lines, "▾ p02"))
    assert "✗ lost since" in lines[at]
    assert lines[at].endswith("(12s)")
    assert "└ port 22 of p02 is closed" in lines[at + 1]
    assert "is sshd running there?" in lines[at + 2]
    assert "? serving" in lines[at + 3]
    assert "▾ p03" in lines[at + 4]


def test_a_node_without_an_engine_says_what_to_do() -> None:
    assert "start vLLM with KvtopConnector there" in "\n".join(fleet_lines(FleetState([node("p01")])))


def test_fleet_percentiles_come_from_merged_samples_not_from_averaged_percentiles() -> None:
    busy = instance("decode-0", latency=latency([0.010] * 990))
    slow = instance("decode-1", latency=latency([1.000] * 10))
    figures = fleet_figures(FleetState([node("p01", [busy]), node("p02", [slow])]))
    row = only(fleet_lines(FleetState([node("p01", [busy]), node("p02", [slow])])), "2/2 nodes")
    assert figures.latency is not None
    assert figures.latency.ttft.count == 1000
    assert "9.9" in row or "10.0ms" in row or "10.1ms" in row  # p50 and p99 of the merged samples
    assert "505ms" not in row  # the mean of 10 ms and 1 s


def test_lost_nodes_are_left_out_of_the_fleets_sums_and_the_row_says_so() -> None:
    fleet = FleetState(
        [node("p01", [instance(running=3)]), lost("p02", instances=[instance("decode-1", running=4)])]
    )
    assert fleet_figures(fleet).running == 3
    assert "1/2 nodes" in only(fleet_lines(fleet), "1/2 nodes")


def test_instances_are_sorted_within_their_node() -> None:
    first = [instance("a", running=1), instance("b", running=9)]
    lines = fleet_lines(
        FleetState([node("p01", first), node("p02", [instance("c", running=5)])]),
        Sort("load", descending=True),
    )
    names = [line.split()[0] for line in lines if "serving" in line]
    assert names == ["b", "a", "c"]


# Transfers


def test_live_transfers_come_first_oldest_first_then_finished_newest_first() -> None:
    rows = [transfer(1, "done", 9), transfer(2, age_s=1), transfer(3, age_s=5), transfer(4, "failed", 2)]
    fleet = FleetState([node("p01", [instance()], rows)])
    order = [row.transfer.id for row in transfer_rows(fleet, None, transfer_columns.COLUMNS, NOW)]
    assert order == [3, 2, 4, 1]


def test_a_sort_keeps_live_transfers_first() -> None:
    rows = [transfer(1, "done", 9, bytes=9), transfer(2, bytes=1), transfer(3, bytes=5)]
    fleet = FleetState([node("p01", [instance()], rows)])
    by_bytes = Sort("bytes", descending=True)
    order = [row.transfer.id for row in transfer_rows(fleet, by_bytes, transfer_columns.COLUMNS, NOW)]
    assert order == [3, 2, 1]


def test_a_transfer_says_where_it_is_for_how_long_and_what_is_left_of_its_lease() -> None:
    stuck = transfer(
        1, "registered", 42, lease_deadline_ns=NODE_NOW_NS - 3 * S, prefill=None, ranks_expected=2
    )
    row = transfer_lines(FleetState([node("p01", [instance()], [stuck])]))[1]
    for part in ("◔ registered", "42s!", "-3s!", "push", "–→decode-0", "0/2", "cmpl-1-d"):
        assert part in row


def test_a_finished_transfer_has_its_figures() -> None:
    done = transfer(1, "done", 5, bytes=65_536, descriptors=12, post_us=31.0, wire_us=812.0, blocks=4)
    row = transfer_lines(FleetState([node("p01", [instance()], [done])]))[1]
    for part in ("✓ done", "65.5kB", " 12 ", "31.0µs", "812µs", "80.7MB"):
        assert part in row


def test_a_transfer_has_the_id_that_cancel_takes() -> None:
    rows = [transfer(7), transfer(1_234_567, "done")]
    lines = transfer_lines(FleetState([node("p01", [instance()], rows)]))
    assert [line.split()[0] for line in lines] == ["id", "7", "1234567"]


def test_a_failure_shows_its_class_and_text() -> None:
    failed = transfer(1, "failed", error_class="handshake", error="timed out after 5 s")
    assert (
        "handshake: timed out after 5 s"
        in transfer_lines(FleetState([node("p01", [instance()], [failed])]))[1]
    )


def test_the_summary_names_the_two_queues_that_wait_for_each_other() -> None:
    rows = [transfer(1, "queued", 4), transfer(2, "queued", 11), transfer(3, "registered", 2)]
    line = text(summary(backlog(FleetState([node("p01", [instance()], rows)])), NOW))
    assert line.startswith("live 3")
    assert "blocks awaiting registration: 2 (oldest 11s)" in line
    assert "registered, awaiting blocks: 1 (oldest 2s)" in line


def test_an_empty_table_says_what_to_do() -> None:
    assert "Fleet screen (1)" in text(empty_lines(FleetState([lost()]))[0])
    assert "KvtopConnector" in text(empty_lines(FleetState([node("p01")]))[0])
    assert "Send a request" in text(empty_lines(FleetState([node("p01", [instance()])]))[1])


def test_the_waterfall_shows_the_time_between_steps_and_the_longest_one() -> None:
    start = NODE_NOW_NS - S
    times = {
        "queued": start,
        "registered": start + 200_000_000,
        "on_wire": start + 900_000_000,
        "done": NODE_NOW_NS,
    }
    row = TransferRow(node("p01"), transfer(1, "done", 0, times_ns=times))
    lines = [text(line) for line in detail(row, NOW, 100)]
    assert "200ms    200ms" in only(lines, "◔ registered")
    assert "700ms    900ms" in only(lines, "▶ on_wire")
    assert "longest: registered → on_wire, 700ms" in lines[-1]


def test_the_detail_shows_how_scattered_a_transfers_blocks_were_and_what_posting_them_took() -> None:
    done = transfer(1, "done", blocks=24, descriptors=92, post_us=2000.0, wire_us=8000.0)
    lines = [text(line) for line in detail(TransferRow(node("p01"), done), NOW, 100)]
    assert only(lines, "fragments") == " fragments    3.83 descriptors per block, post/wire 25%"
    unknown = [text(line) for line in detail(TransferRow(node("p01"), transfer(1)), NOW, 100)]
    assert only(unknown, "fragments") == " fragments    – descriptors per block, post/wire –"


def test_json_has_the_same_ratios_and_null_where_they_are_unknown() -> None:
    rows = [
        transfer(1, "done", blocks=24, descriptors=6, post_us=2000.0, wire_us=8000.0),
        transfer(2, "done", blocks=0, descriptors=0, post_us=0.0, wire_us=0.0),
        transfer(3),
    ]
    (shown,) = json.loads(as_json([node("p01", [instance()], rows)]))["nodes"]
    assert [(row["descriptors_per_block"], row["post_share"]) for row in shown["transfers"]] == [
        (0.25, 0.25),
        (None, None),
        (None, None),
    ]
    assert shown["transfers"][0]["prefill"]["name"] == "prefill-0"


# Header, notices, histogram, help


def test_the_header_counts_links_and_marks_simulated_engines_at_any_width() -> None:
    for width in (60, 80, 120, 200):
        line = text(header(small_fleet(simulated=True), NOW, "Fleet", width))
        assert len(line) == width
        assert "SIMULATED" in line
    assert "2/3 live" in line
    assert "1 lost" in line
    assert "SIMULATED" not in text(header(small_fleet(), NOW, "Fleet", 120))


def test_simulated_rows_are_marked() -> None:
    assert "SIM" in only(fleet_lines(small_fleet(simulated=True)), "prefill-0")
    assert "SIM" not in only(fleet_lines(small_fleet()), "prefill-0")


def test_a_gap_is_shown_as_a_gap() -> None:
    gap = Gap(NODE_NOW_NS - 20 * S, NODE_NOW_NS - 18 * S, "agent was restarted", 12)
    (line,) = notices(FleetState([node("p01", [instance(gaps=[gap])])]), NOW)
    assert "prefill-0: no data " in text(line)
    assert "(agent was restarted), 12 events lost" in text(line)


def test_instances_that_miss_the_same_time_share_one_notice() -> None:
    gaps = [Gap(NODE_NOW_NS - 20 * S, NODE_NOW_NS - (18 - n) * S, "no agent", n) for n in range(3)]
    instances = [instance(f"prefill-{n}", gaps=[gap]) for n, gap in enumerate(gaps)]
    (line,) = notices(FleetState([node("p01", instances)]), NOW)
    assert "prefill-0, prefill-1 and 1 more: no data " in text(line)
    assert text(line).endswith("(no agent), 3 events lost")


def test_old_gaps_go_and_many_gaps_are_counted() -> None:
    def gap(ago_s: int) -> Gap:
        return Gap(NODE_NOW_NS - (ago_s + 1) * S, NODE_NOW_NS - ago_s * S, "agent was restarted")

    old = FleetState([node("p01", [instance(gaps=[gap(3600)])])])
    many = FleetState([node("p01", [instance(gaps=[gap(10 * n) for n in range(5)])])])
    assert notices(old, NOW) == []
    lines = [text(line) for line in notices(many, NOW)]
    assert len(lines) == 3
    assert "+2 more gaps" in lines[-1]


def test_the_histogram_names_scope_window_and_count_and_has_all_samples_in_its_bars() -> None:
    samples = [0.010] * 50 + [0.020] * 100 + [0.080] * 25
    lines = [text(line) for line in histogram(sketch(samples), Scope("TTFT", "fleet", 60.0), 60, 10)]
    assert lines[0].startswith(" TTFT · fleet · last 60 s · n=175")
    assert "p50 " in lines[1]
    assert len(lines) == 10
    assert all(len(line) == 60 for line in lines)
    assert lines[-1].rstrip().endswith("ms")
    tallest = lines[2].index("█")
    twenty = lines[-1].index("20") + 1
    assert abs(tallest - twenty) <= 3


def test_a_histogram_without_samples_says_so() -> None:
    lines = [text(line) for line in histogram(None, Scope("ITL", "prefill-0", 60.0), 40, 8)]
    assert "n=0" in lines[0]
    assert "no ITL sample" in lines[1]
    assert len(lines) == 8


def test_help_lists_every_action_and_column() -> None:
    shown = "\n".join(text(line) for line in help_lines())
    for part in ("Quit", "Pause", "Theme", "Reverse", "TTFT99", "lease", "not known"):
        assert part in shown


def test_a_lost_nodes_ages_stand_still_and_a_live_ones_go_on() -> None:
    later = NOW._replace(monotonic_s=NOW.monotonic_s + 5)
    stamp = NODE_NOW_NS - S
    assert node("p01").age_s(stamp, later) == 6
    assert lost("p02").age_s(stamp, later) == 1


def test_a_fleet_is_hopeless_only_when_no_target_was_ever_heard() -> None:
    never = NodeState("p04", LinkState("lost", NOW.wall_s))
    assert FleetState([never]).hopeless
    assert not FleetState([never, node("p01")]).hopeless
    assert not FleetState([lost("p02")]).hopeless
    assert not FleetState([NodeState("p05", LinkState("connecting", NOW.wall_s))]).hopeless
