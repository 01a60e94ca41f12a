"""The columns of the Fleet screen: what each says, how it sorts, and what a narrow screen drops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from kvtop.agents import latency
from kvtop.agents.model import LIVE_STAGES, Instance
from kvtop.agents.stock.window import quantile_bound
from kvtop.console.clock import Moment
from kvtop.console.fleet.figures import Figures
from kvtop.console.fleet.state import FleetState
from kvtop.console.views import format as fmt
from kvtop.console.views.fleet_rows import STATE_MARKS, FleetRow, span
from kvtop.console.views.table import Cell, Column, SortKey, Table, Tone, for_fleet
from kvtop.console.views.transfer_rows import STUCK_S

_ROLES = {"prefill": "P", "decode": "D", "both": "B"}
_STAGE_TITLES = ("que", "reg", "mat", "hsk", "pst", "wir")


def _name(row: FleetRow, _now: Moment) -> Cell:
    if row.instance is None:
        return Cell(row.figures.label, "strong")
    return Cell(f" {row.instance.name}", _tone(row))


def _tone(row: FleetRow, tone: Tone = "") -> Tone:
    """Dim the last known figures of what no longer reports."""
    old = row.node is not None and not row.node.live
    return "muted" if old or (row.instance and row.instance.state in ("down", "stopped", "stale")) else tone


def _state(row: FleetRow, _now: Moment) -> Cell:
    if row.instance is None or row.node is None:
        of = row.figures
        return Cell(f"{of.heard}/{of.heard + of.unheard} nodes", "warn" if of.unheard else "muted")
    if not row.node.live:
        return Cell(f"? {row.instance.state}", "warn")
    mark = STATE_MARKS[row.instance.state]
    return Cell(f"{mark.text} {row.instance.state}", mark.tone)


def _since_key(row: FleetRow, now: Moment) -> float | None:
    return row.node.age_s(row.instance.state_since_ns, now) if row.instance and row.node else None


def _since(row: FleetRow, now: Moment) -> Cell:
    return Cell(fmt.age(_since_key(row, now)), _tone(row, "muted")) if row.instance else Cell("")


def _of_instance(read: Callable[[Instance], Cell]) -> Callable[[FleetRow, Moment], Cell]:
    def cell(row: FleetRow, _now: Moment) -> Cell:
        if row.instance is None:
            return Cell("")
        text, tone = read(row.instance)
        return Cell(text, _tone(row, tone))

    return cell


def _figure(
    read: Callable[[Figures], str], alarm: Callable[[Figures], bool] | None = None
) -> Callable[[FleetRow, Moment], Cell]:
    def cell(row: FleetRow, _now: Moment) -> Cell:
        return Cell(read(row.figures), "bad" if alarm and alarm(row.figures) else _tone(row))

    return cell


def _load(of: Figures) -> str:
    return f"{fmt.count(of.running)}/{fmt.count(of.waiting)}"


def _quantile(of: Figures, which: Literal["ttft", "itl"], q: float) -> float | None:
    return latency.quantile(getattr(of.latency, which), q) if of.latency else None


def _latency_cell(which: Literal["ttft", "itl"], q: float) -> Callable[[FleetRow, Moment], Cell]:
    def cell(row: FleetRow, _now: Moment) -> Cell:
        buckets = row.instance.latency_buckets if row.instance else None
        if buckets is None:
            return Cell(fmt.duration(_quantile(row.figures, which, q)), _tone(row))
        bound_s = quantile_bound(getattr(buckets, which), q)
        known = bound_s is not None and bound_s < float("inf")
        return Cell(f"≤{fmt.duration(bound_s)}" if known else fmt.UNKNOWN, _tone(row))

    return cell


def _latency_column(which: Literal["ttft", "itl"], q: float, drop: int) -> Column[FleetRow]:
    title = f"{which.upper()}{q * 100:.0f}"
    return Column(
        id=f"{which}_p{q * 100:.0f}",
        title=title,
        width=7,
        cell=_latency_cell(which, q),
        sort_key=lambda row, _: _quantile(row.figures, which, q),
        help=f"{which.upper()} p{q * 100:.0f} over the agent's window, from merged sketches (1 % error)",
        drop=drop,
    )


def _stage_columns() -> Iterator[Column[FleetRow]]:
    for stage, title in zip(LIVE_STAGES, _STAGE_TITLES, strict=True):
        yield Column(
            id=f"depth_{stage}",
            title=title,
            width=3,
            cell=_depth_cell(stage),
            help=f"live transfers in stage {stage}, now",
            drop=9,
        )


def _depth_cell(stage: str) -> Callable[[FleetRow, Moment], Cell]:
    def cell(row: FleetRow, _now: Moment) -> Cell:
        depth = row.figures.stage_depths.get(stage, 0)
        if row.instance and row.instance.observed:
            return Cell(fmt.UNKNOWN, "muted")
        return Cell(fmt.count(depth) if depth else "·", _tone(row, "" if depth else "muted"))

    return cell


def _live(of: Figures) -> int:
    return sum(of.stage_depths.get(stage, 0) for stage in LIVE_STAGES)


def _live_cell(row: FleetRow, _now: Moment) -> Cell:
    known = not (row.instance and row.instance.observed)
    return Cell(fmt.count(_live(row.figures) if known else None), _tone(row))


def _oldest(row: FleetRow, now: Moment) -> Cell:
    age_s = row.figures.oldest_live_s(now)
    if age_s is None:
        return Cell("", "muted")
    stuck = age_s >= STUCK_S
    return Cell(f"{fmt.age(age_s)}{'!' if stuck else ''}", _tone(row, "warn" if stuck else ""))


def _kv_key(row: FleetRow, _now: Moment) -> SortKey:
    return row.instance.kv_usage if row.instance else None


def _role(instance: Instance) -> Cell:
    return Cell(f"{_ROLES[instance.role]} {instance.mode or fmt.UNKNOWN}", instance.mode or "muted")


def _sim(row: FleetRow, _now: Moment) -> Cell:
    if row.instance and row.instance.observed:
        return Cell("OBS", "accent")
    return Cell("SIM", "sim") if row.instance and row.instance.simulated else Cell("")


COLUMNS: tuple[Column[FleetRow], ...] = (
    Column(
        "name",
        "instance",
        10,
        _name,
        "the instance's name, under its node",
        lambda r, _: r.figures.label,
        descending=False,
        right=False,
        flex=3,
        most=32,
    ),
    Column(
        "sim",
        "",
        3,
        _sim,
        "SIM: a simulated engine; OBS: only observed, through its own metrics",
        right=False,
    ),
    Column(
        "role",
        "role",
        6,
        _of_instance(_role),
        "P prefill, D decode, B both; and the direction that requests take unless they say otherwise",
        lambda r, _: r.instance.role if r.instance else None,
        descending=False,
        right=False,
    ),
    Column(
        "state",
        "state",
        10,
        _state,
        "the instance's state",
        lambda r, _: r.instance.state if r.instance else None,
        descending=False,
        right=False,
    ),
    Column("since", "for", 6, _since, "how long the instance has been in this state", _since_key, drop=12),
    Column(
        "load",
        "run/wt",
        6,
        _figure(_load),
        "requests running and waiting in the scheduler, now",
        lambda r, _: r.figures.running,
    ),
    Column(
        "kv",
        "KV",
        4,
        _of_instance(lambda i: Cell(fmt.share(i.kv_usage))),
        "share of the instance's KV cache in use, now",
        _kv_key,
    ),
    Column(
        "live",
        "live",
        4,
        _live_cell,
        "live KV transfers in any stage, now",
        lambda r, _: _live(r.figures),
        drop=11,
    ),
    *_stage_columns(),
    Column(
        "sent",
        "out/s",
        6,
        _figure(lambda of: fmt.size(of.sent_bytes_per_s)),
        "KV payload bytes sent per wall-clock second, over 10 s",
        lambda r, _: r.figures.sent_bytes_per_s,
        drop=2,
    ),
    Column(
        "received",
        "in/s",
        6,
        _figure(lambda of: fmt.size(of.received_bytes_per_s)),
        "KV payload bytes received per wall-clock second, over 10 s",
        lambda r, _: r.figures.received_bytes_per_s,
        drop=3,
    ),
    _latency_column("ttft", 0.5, 10),
    _latency_column("ttft", 0.99, 0),
    _latency_column("itl", 0.5, 10),
    _latency_column("itl", 0.99, 0),
    Column(
        "failed",
        "fail",
        4,
        _figure(lambda of: fmt.count(of.failed), lambda of: bool(of.failed)),
        "transfers that ended without success since the agent knows the instance",
        lambda r, _: r.figures.failed,
    ),
    Column(
        "oldest",
        "oldest",
        6,
        _oldest,
        f"age of the oldest live transfer; ! from {STUCK_S:.0f} s on",
        lambda r, now: r.figures.oldest_live_s(now),
    ),
)


def fleet_table(fleet: FleetState) -> Table[FleetRow]:
    """Return the table of the Fleet screen: names have the room that they need, SIM is there where needed."""
    instances = [instance for node in fleet.nodes for instance in node.instances]
    marked = fleet.simulated or any(each.observed for each in instances)
    return Table(
        for_fleet(COLUMNS, "name", [f" {each.name}" for each in instances], simulated=marked),
        key=_row_key,
        span=span,
    )


def _row_key(row: FleetRow) -> tuple[str, ...]:
    return row.key
