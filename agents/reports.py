"""What `kvtop-agent status` and `transfers` print: one snapshot, as JSON or as a plain table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from kvtop.agents.facts import Host
from kvtop.agents.latency import quantile
from kvtop.agents.model import SCHEMA_VERSION, Instance, Node, Snapshot, Transfer
from kvtop.agents.remarks import remarks
from kvtop.agents.stock.window import quantile_bound
from kvtop.agents.text import age, printable

Report = Literal["status", "transfers"]
UNKNOWN: Final = "–"
WIDTH: Final = 160
"""Columns of a table that goes to no terminal."""
LAST_WORDS: Final = 5
"""Most lines of a dead engine's log that are printed."""


class StatusJson(msgspec.Struct, frozen=True):
    """The JSON of `status`."""

    schema_version: int
    node: Node
    instances: list[Instance]
    host: Host | None = None


class TransfersJson(msgspec.Struct, frozen=True):
    """The JSON of `transfers`."""

    schema_version: int
    node: Node
    transfers: list[Transfer]


def as_json(report: Report, snapshot: Snapshot) -> str:
    """Return a snapshot as one line of JSON."""
    value: msgspec.Struct = (
        StatusJson(SCHEMA_VERSION, snapshot.node, snapshot.instances, snapshot.host)
        if report == "status"
        else TransfersJson(SCHEMA_VERSION, snapshot.node, snapshot.transfers)
    )
    return msgspec.json.encode(value).decode()


def as_table(report: Report, snapshot: Snapshot) -> str:
    """Return a snapshot as plain text."""
    rows: dict[Report, Callable[[Snapshot], Table]] = {"status": _status, "transfers": _transfers}
    console = Console(
        width=WIDTH, no_color=True, force_terminal=False, markup=False, emoji=False, highlight=False
    )
    with console.capture() as capture:
        console.print(rows[report](snapshot))
        if report == "status":
            lines = [_host_line(snapshot.host)] if snapshot.host else []
            console.print(*lines, *_remarks(snapshot), *_last_words(snapshot), sep="\n", soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().split("\n")).rstrip("\n")


def _status(snapshot: Snapshot) -> Table:
    table = _table("INSTANCE | ROLE | MODE | STATE | RUN | WAIT | KV | DONE | FAILED | TTFT p50/p99 ms")
    for each in snapshot.instances:
        table.add_row(
            printable(_name(each)),
            each.role,
            each.mode or UNKNOWN,
            printable(_state(each, snapshot.node)),
            _text(each.running),
            _text(each.waiting),
            UNKNOWN if each.kv_usage is None else f"{each.kv_usage:.0%}",
            _text(each.kv_counters.transfers if each.kv_counters else each.transfers_done),
            _text(each.failed),
            _percentiles(each),
        )
    return table


def _name(instance: Instance) -> str:
    if instance.observed:
        return f"{instance.name} (observed: {instance.observed})"
    return f"{instance.name} (simulated)" if instance.simulated else instance.name


def _state(instance: Instance, node: Node) -> str:
    why = instance.state_reason
    if instance.state == "stale":
        since_s = (node.clock.wall_ns + instance.state_since_ns - node.clock.monotonic_ns) / 1e9
        why = f"not reporting since {time.strftime('%H:%M:%S', time.localtime(since_s))}: {why}"
    return f"{instance.state} ({why})" if why else instance.state


def _host_line(host: Host) -> str:
    """Return the node's figures as one line."""

    def share(free: int | None, total: int | None) -> str:
        if free is None or not total:
            return UNKNOWN
        return f"{1 - free / total:.0%} of {total / (1 << 30):.0f} GiB"

    percent = UNKNOWN if host.cpu_percent is None else f"{host.cpu_percent:.0f} % of {host.cores} cores"
    busy = f" ({host.busy_cores} busy)" if host.busy_cores is not None else ""
    load = UNKNOWN if host.load_1m is None else f"{host.load_1m:.1f}"
    uptime = UNKNOWN if host.uptime_s is None else age(host.uptime_s)
    return (
        f"node: CPU {percent}{busy}, load {load}, "
        f"memory {share(host.memory_available_bytes, host.memory_total_bytes)}, "
        f"disk {share(host.disk_free_bytes, host.disk_total_bytes)}, up {uptime}"
    )


def _remarks(snapshot: Snapshot) -> list[str]:
    names = {each.engine_id: each.name for each in snapshot.instances}
    now_ns = snapshot.node.clock.monotonic_ns

    def age_s(stamp_ns: int | None) -> float | None:
        return None if stamp_ns is None else (now_ns - stamp_ns) / 1e9

    return [
        printable(f"{each.name}: {remark.text(age_s)}")
        for each in snapshot.instances
        for remark in remarks(each, lambda engine_id: names.get(engine_id, engine_id), age_s)
    ]


def _last_words(snapshot: Snapshot) -> Iterator[str]:
    """Yield what engines that are down had logged last; all of it is in the JSON."""
    for each in snapshot.instances:
        if each.state == "down" and each.exit is not None and each.exit.log_lines:
            yield printable(f"{each.name}: the last that it logged:")
            yield from (f"    {printable(line)}" for line in each.exit.log_lines[-LAST_WORDS:])


def _percentiles(instance: Instance) -> str:
    if instance.latency_buckets is not None:
        bounds = (quantile_bound(instance.latency_buckets.ttft, q) for q in (0.5, 0.99))
        return " / ".join(bound_text(bound) for bound in bounds)
    if instance.latency is None:
        return UNKNOWN
    values = (quantile(instance.latency.ttft, q) for q in (0.5, 0.99))
    return " / ".join(UNKNOWN if value is None else f"{value * 1e3:.1f}" for value in values)


def bound_text(bound_s: float | None) -> str:
    """Return what a duration is at most, in ms.

    >>> bound_text(0.25), bound_text(float("inf")), bound_text(None)
    ('≤ 250', '> all buckets', '–')
    """
    if bound_s is None:
        return UNKNOWN
    return "> all buckets" if bound_s == float("inf") else f"≤ {bound_s * 1e3:g}"


def _transfers(snapshot: Snapshot) -> Table:
    table = _table("ID | DIR | STAGE | AGE s | FROM | TO | BLOCKS | BYTES | DESC | POST µs | WIRE µs | ERROR")
    now_ns = snapshot.node.clock.monotonic_ns
    for each in snapshot.transfers:
        table.add_row(
            str(each.id),
            each.direction or UNKNOWN,
            f"{each.stage} (simulated)" if each.simulated else each.stage,
            f"{(now_ns - each.stage_since_ns) / 1e9:.1f}",
            printable(each.prefill.name) if each.prefill else UNKNOWN,
            printable(each.decode.name) if each.decode else UNKNOWN,
            _text(each.blocks),
            _text(each.bytes),
            _text(each.descriptors),
            UNKNOWN if each.post_us is None else f"{each.post_us:.0f}",
            UNKNOWN if each.wire_us is None else f"{each.wire_us:.0f}",
            printable(each.error or ""),
        )
    return table


def _table(headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in headings.split(" | "):
        table.add_column(heading, no_wrap=heading != "ERROR", overflow="fold")
    return table


def _text(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
