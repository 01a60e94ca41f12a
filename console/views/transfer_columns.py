"""The columns of the Transfers screen: what each says, how it sorts, and what a narrow screen drops."""

from __future__ import annotations

from collections.abc import Callable

from kvtop.agents.model import Transfer
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState, is_live
from kvtop.console.views import format as fmt
from kvtop.console.views.table import Cell, Column, SortKey, Table, Tone, for_fleet
from kvtop.console.views.transfer_rows import (
    LEASE_SHORT_S,
    STAGE_MARKS,
    STUCK_S,
    TransferRow,
    endpoints,
    lease_s,
    rate_bytes_per_s,
    request_id,
    stage_cell,
)

_ORDER = {stage: float(number) for number, stage in enumerate(STAGE_MARKS)}


def _age_key(row: TransferRow, _now: Moment) -> float:
    return -row.transfer.stage_since_ns - row.node.wall_offset_ns


def _tone(row: TransferRow, tone: Tone = "") -> Tone:
    return tone if row.node.live and is_live(row.transfer) else "muted"


def _stage(row: TransferRow, _now: Moment) -> Cell:
    if not row.node.live and is_live(row.transfer):
        return Cell(f"? {row.transfer.stage}", "warn")
    return stage_cell(row.transfer.stage)


def _age(row: TransferRow, now: Moment) -> Cell:
    seconds = row.node.age_s(row.transfer.stage_since_ns, now) or 0.0
    if is_live(row.transfer) and seconds >= STUCK_S:
        return Cell(f"{fmt.age(seconds)}!", _tone(row, "warn"))
    return Cell(fmt.age(seconds), _tone(row))


def _lease(row: TransferRow, now: Moment) -> Cell:
    left_s = lease_s(row, now)
    if left_s is None:
        return Cell(fmt.UNKNOWN if is_live(row.transfer) else "", "muted")
    short = left_s < LEASE_SHORT_S
    return Cell(
        f"{fmt.countdown(left_s)}{'!' if short else ''}",
        _tone(row, "bad" if left_s < 0 else "warn" if short else ""),
    )


def _ranks(row: TransferRow, _now: Moment) -> Cell:
    expected = row.transfer.ranks_expected
    return Cell(f"{row.transfer.ranks_done}/{fmt.UNKNOWN if expected is None else expected}", _tone(row))


def _direction(row: TransferRow, _now: Moment) -> Cell:
    direction = row.transfer.direction
    return Cell(direction, direction) if direction else Cell(fmt.UNKNOWN, "muted")


def _error(row: TransferRow, _now: Moment) -> Cell:
    transfer = row.transfer
    text = ": ".join(part for part in (transfer.error_class, transfer.error) if part)
    return Cell(text, "bad" if text else "")


def _value(read: Callable[[Transfer], str]) -> Callable[[TransferRow, Moment], Cell]:
    def cell(row: TransferRow, _now: Moment) -> Cell:
        return Cell(read(row.transfer), _tone(row))

    return cell


def _key(read: Callable[[Transfer], SortKey]) -> Callable[[TransferRow, Moment], SortKey]:
    return lambda row, _now: read(row.transfer)


def _sim(row: TransferRow, _now: Moment) -> Cell:
    return Cell("SIM", "sim") if row.transfer.simulated else Cell("")


COLUMNS: tuple[Column[TransferRow], ...] = (
    Column(
        "id",
        "id",
        2,
        lambda r, _: Cell(str(r.transfer.id), _tone(r)),
        "the agent's number for the transfer: what `kvtop cancel` takes",
    ),
    Column(
        "stage", "stage", 13, _stage, "where the transfer is", _key(lambda t: _ORDER[t.stage]), right=False
    ),
    Column("sim", "", 3, _sim, "SIM: between simulated engines", right=False),
    Column(
        "age", "for", 6, _age, f"time in this stage; live ones are marked ! from {STUCK_S:.0f} s on", _age_key
    ),
    Column(
        "lease",
        "lease",
        6,
        _lease,
        "time until P's lease on its blocks ends; negative: it is over",
        lease_s,
        descending=False,
    ),
    Column(
        "direction",
        "dir",
        4,
        _direction,
        "push: P writes; pull: D reads",
        _key(lambda t: t.direction),
        right=False,
        descending=False,
    ),
    Column(
        "pair",
        "P→D",
        18,
        lambda r, _: Cell(endpoints(r.transfer), _tone(r)),
        "prefill and decode instance",
        _key(endpoints),
        right=False,
        descending=False,
        flex=2,
        most=48,
    ),
    Column(
        "blocks",
        "blk",
        4,
        _value(lambda t: fmt.count(t.blocks)),
        "KV blocks that take part",
        _key(lambda t: t.blocks),
        drop=6,
    ),
    Column(
        "bytes",
        "bytes",
        6,
        _value(lambda t: fmt.size(t.bytes)),
        "payload bytes of all ranks",
        _key(lambda t: t.bytes),
        drop=1,
    ),
    Column(
        "descriptors",
        "desc",
        5,
        _value(lambda t: fmt.count(t.descriptors)),
        "NIXL descriptors after merging, all ranks",
        _key(lambda t: t.descriptors),
        drop=7,
    ),
    Column(
        "post",
        "post",
        6,
        _value(lambda t: fmt.microseconds(t.post_us)),
        "NIXL's time to post, slowest rank",
        _key(lambda t: t.post_us),
        drop=5,
    ),
    Column(
        "wire",
        "wire",
        6,
        _value(lambda t: fmt.microseconds(t.wire_us)),
        "NIXL's transfer time, slowest rank",
        _key(lambda t: t.wire_us),
        drop=2,
    ),
    Column(
        "rate",
        "B/s",
        6,
        _value(lambda t: fmt.size(rate_bytes_per_s(t))),
        "payload bytes by NIXL's transfer time: of this transfer alone",
        _key(rate_bytes_per_s),
        drop=4,
    ),
    Column("ranks", "ranks", 5, _ranks, "ranks that completed / ranks that take part", drop=3),
    Column(
        "error",
        "error",
        9,
        _error,
        "why it ended without success",
        _key(lambda t: t.error_class),
        right=False,
        descending=False,
        flex=4,
    ),
    Column(
        "request",
        "request",
        12,
        _value(lambda t: request_id(t) or fmt.UNKNOWN),
        "decode's request id, else prefill's",
        _key(request_id),
        right=False,
        descending=False,
        drop=8,
        flex=2,
    ),
    Column(
        "node",
        "agent",
        8,
        lambda r, _: Cell(r.node.target, "muted"),
        "the agent that reports it",
        lambda r, _: r.node.target,
        right=False,
        descending=False,
        drop=9,
        flex=1,
    ),
)


def transfer_table(fleet: FleetState) -> Table[TransferRow]:
    """Return the table of the Transfers screen: ids and pairs have the room that they need, SIM where needed.

    An id is what an operator types: it is never cut short.
    """
    longest = {"P": "", "D": ""}
    for node in fleet.nodes:
        for instance in node.instances:
            side = "D" if instance.role == "decode" else "P"
            longest[side] = max(longest[side], instance.name, key=len)
    pair = f"{longest['P']}→{longest['D']}"
    columns = for_fleet(COLUMNS, "pair", [pair], simulated=fleet.simulated)
    last = max((max(node.transfers, default=0) for node in fleet.nodes), default=0)
    return Table(for_fleet(columns, "id", [str(last)], simulated=True), key=_row_key)


def _row_key(row: TransferRow) -> tuple[str, int, int]:
    return row.key
