"""What `kvtop-agent status` and `transfers` print: one snapshot, as JSON or as a plain table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from kvtop.agents.latency import quantile
from kvtop.agents.model import SCHEMA_VERSION, Instance, Node, Snapshot, Transfer
from kvtop.agents.remarks import remarks
from kvtop.agents.text import printable

Report = Literal["status", "transfers"]
UNKNOWN: Final = "–"
WIDTH: Final = 160
"""Columns of a table that goes to no terminal."""


class StatusJson(msgspec.Struct, frozen=True):
    """The JSON of `status`."""

    schema_version: int
    node: Node
    instances: list[Instance]


class TransfersJson(msgspec.Struct, frozen=True):
    """The JSON of `transfers`."""

    schema_version: int
    node: Node
    transfers: list[Transfer]


def as_json(report: Report, snapshot: Snapshot) -> str:
    """Return a snapshot as one line of JSON."""
    value: msgspec.Struct = (
        StatusJson(SCHEMA_VERSION, snapshot.node, snapshot.instances)
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
            console.print(*_remarks(snapshot), sep="\n", soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().split("\n")).rstrip("\n")


def _status(snapshot: Snapshot) -> Table:
    table = _table("INSTANCE | ROLE | MODE | STATE | RUN | WAIT | KV | DONE | FAILED | TTFT p50/p99 ms")
    for each in snapshot.instances:
        table.add_row(
            printable(f"{each.name} (simulated)" if each.simulated else each.name),
            each.role,
            each.mode,
            printable(f"{each.state} ({each.state_reason})" if each.state_reason else each.state),
            _text(each.running),
            _text(each.waiting),
            UNKNOWN if each.kv_usage is None else f"{each.kv_usage:.0%}",
            str(each.transfers_done),
            str(sum(each.transfers_failed.values())),
            _percentiles(each),
        )
    return table


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


def _percentiles(instance: Instance) -> str:
    if instance.latency is None:
        return UNKNOWN
    values = (quantile(instance.latency.ttft, q) for q in (0.5, 0.99))
    return " / ".join(UNKNOWN if value is None else f"{value * 1e3:.1f}" for value in values)


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
