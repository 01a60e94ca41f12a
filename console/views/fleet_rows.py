"""The fleet as a table: the whole, then each node with its instances and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kvtop.agents.model import Instance, InstanceState
from kvtop.agents.remarks import Kind, Remark, remarks
from kvtop.agents.text import plural
from kvtop.console.clock import Moment
from kvtop.console.fleet.figures import Figures, Member, figures, fleet_figures, instance_figures, members_of
from kvtop.console.fleet.state import FleetState, NodeState
from kvtop.console.views import format as fmt
from kvtop.console.views.table import Cell, Column, Sort, ordered
from kvtop.console.views.transfer_rows import STAGE_MARKS

STATE_MARKS: dict[InstanceState, Cell] = {
    "starting": Cell("◌", "accent"),
    "serving": Cell("●", "good"),
    "draining": Cell("◔", "warn"),
    "drained": Cell("○", "accent"),
    "stopped": Cell("■", "muted"),
    "down": Cell("✗", "bad"),
    "stale": Cell("?", "warn"),
}
REMARK_MARKS: dict[Kind, Cell] = {"quarantine": STAGE_MARKS["quarantined"], "pair": STAGE_MARKS["failed"]}


class FleetRow(msgspec.Struct, frozen=True):
    """One line of the Fleet screen."""

    kind: Literal["fleet", "node", "instance", "note"]
    key: tuple[str, ...]
    figures: Figures
    """Of the fleet, of the node, or of the instance that the line is about."""
    node: NodeState | None = None
    instance: Instance | None = None
    text: str = ""
    """What a note on a node says."""
    remark: Remark | None = None
    """What a note on an instance says; one without says the instance's state."""


def fleet_rows(
    fleet: FleetState, sort: Sort | None, columns: Sequence[Column[FleetRow]], now: Moment
) -> list[FleetRow]:
    """Return the lines in order: instances are sorted within their node, nodes stay where they were named."""
    rows = [FleetRow("fleet", ("fleet",), fleet_figures(fleet))]
    names = {each.engine_id: each.name for node in fleet.nodes for each in node.instances}
    for node in fleet.nodes:
        of_node = figures(node.target, [node])
        rows.append(FleetRow("node", ("node", node.target), of_node, node))
        notes = enumerate(_node_notes(node))
        rows += [
            FleetRow("note", ("note", node.target, str(n)), of_node, node, text=text) for n, text in notes
        ]
        instances = [_instance_row(member) for member in members_of([node])]
        for row in ordered(instances, sort, columns, now):
            rows.append(row)
            if _needs_note(row):
                rows.append(FleetRow("note", ("note", *row.key), row.figures, node, row.instance))
            rows += _remarks(row, node, names, now)
    return rows


def _instance_row(member: Member) -> FleetRow:
    return FleetRow(
        "instance", ("instance", *member.key), instance_figures(member), member.node, member.instance
    )


def _remarks(row: FleetRow, node: NodeState, names: Mapping[str, str], now: Moment) -> Iterator[FleetRow]:
    """Yield a note for each thing that there is to say of an instance beside its figures."""
    assert row.instance is not None
    said = remarks(
        row.instance,
        lambda engine_id: names.get(engine_id, engine_id),
        lambda stamp_ns: node.age_s(stamp_ns, now),
    )
    for number, remark in enumerate(said):
        key = ("note", *row.key, str(number))
        yield FleetRow("note", key, row.figures, node, row.instance, remark=remark)


def _node_notes(node: NodeState) -> list[str]:
    """Return what is wrong with a node and what to do, a line each."""
    if node.link.phase == "lost" and (error := node.link.error):
        return [f"└ {error.what}", f"  {error.remedy}"] if error.remedy else [f"└ {error.what}"]
    return [no_engine_text(node)] if node.live and not node.instances else []


def _needs_note(row: FleetRow) -> bool:
    return row.instance is not None and (
        row.instance.state in ("down", "stale")
        or (row.instance.state != "stopped" and bool(row.instance.state_reason))
    )


def span(row: FleetRow, now: Moment) -> tuple[Cell, ...] | None:
    """Return the running text of a node line or a note, None for lines with columns."""
    if row.node is None or row.kind in ("fleet", "instance"):
        return None
    if row.kind == "node":
        return node_line(row.node, now)
    if row.instance is None:
        return (Cell(f"  {row.text}", "muted" if row.node.live else "warn"),)
    if row.remark is not None:
        return _remark_line(row.remark, row.node, now)
    state, since = row.instance.state, row.instance.state_since_ns
    if state == "draining":  # what is left must fit on a small screen
        told = f"  └ draining for {fmt.age(row.node.age_s(since, now))}; {row.instance.state_reason}"
        return (Cell(told, STATE_MARKS[state].tone),)
    why = f": {row.instance.state_reason}" if row.instance.state_reason else ""
    when = f"{fmt.clock_time(row.node.wall_s(since))} ({fmt.age(row.node.age_s(since, now))} ago)"
    said = "not reporting" if state == "stale" else state
    return (Cell(f"  └ {said} since {when}{why}", STATE_MARKS[state].tone),)


def _remark_line(remark: Remark, node: NodeState, now: Moment) -> tuple[Cell, ...]:
    mark = REMARK_MARKS[remark.kind]
    told = remark.text(lambda stamp_ns: node.age_s(stamp_ns, now))
    return (Cell(f"  └ {mark.text} {told}", mark.tone if node.live else "muted"),)


def no_engine_text(node: NodeState) -> str:
    """Say why a node has no instances and what to do."""
    name = node.node.name if node.node else node.target
    return f"no engine has attached to the agent on {name} yet: start vLLM with KvtopConnector there"


def node_line(node: NodeState, now: Moment) -> tuple[Cell, ...]:
    """Return a node's heading: its target and how its connection is."""
    name = node.node.name if node.node else ""
    title = node.target if name in ("", node.target) else f"{node.target} ({name})"
    cells = [Cell("▾ ", "muted"), Cell(title, "strong"), Cell("  ")]
    link = node.link
    since = f"{fmt.clock_time(link.since_s)} ({fmt.age(now.wall_s - link.since_s)})"
    if link.phase == "live" and node.node is not None:
        cells += [Cell("● live", "good"), Cell(f" since {since}", "muted")]
        cells.append(Cell(f"  {node.node.software}, pid {node.node.agent_pid}", "muted"))
        if node.node.rejected_frames:
            cells.append(Cell(f"  ! {plural(node.node.rejected_frames, 'bad frame')} refused", "warn"))
    elif link.phase == "lost":
        cells.append(Cell(f"✗ {'lost' if node.node else 'no connection'} since {since}", "bad"))
    else:
        cells.append(Cell(f"◌ connecting since {since}", "accent"))
    return tuple(cells)
