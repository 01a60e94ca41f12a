"""The line at the top of every screen, and the notices at its bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from kvtop.agents.model import Gap
from kvtop.agents.text import noun
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState, NodeState
from kvtop.console.views import format as fmt
from kvtop.console.views.fleet_rows import STATE_MARKS
from kvtop.console.views.table import Cell

GAP_SHOWN_S = 600.0
"""How long after its end a gap is still announced."""
_SCREENS = (("1", "Fleet"), ("2", "Transfers"))


def header(
    fleet: FleetState, now: Moment, screen: str, width: int, *, paused: bool = False
) -> tuple[Cell, ...]:
    """Return the top line: screens, links, instances, badges, clock. What does not fit goes, badges never."""
    right = [Cell(f" {fmt.clock_time(now.wall_s)} ")]
    if paused:
        right.insert(0, Cell(" PAUSED ", "badge"))
    if fleet.simulated:
        right.insert(0, Cell(" SIMULATED ", "badge"))
    cells = [Cell(" kvtop ", "strong")]
    room = width - _length(right) - _length(cells)
    for part in (_tabs(screen), _links(fleet), _instances(fleet)):
        chosen = next((form for form in part if _length(form) <= room), [])
        cells += chosen
        room -= _length(chosen)
    return (*cells, Cell(" " * max(0, room)), *right)


def _length(cells: list[Cell]) -> int:
    return sum(cell_len(cell.text) for cell in cells)


def _tabs(screen: str) -> list[list[Cell]]:
    tabs = (Cell(f" {key} {name} ", "accent" if name == screen else "muted") for key, name in _SCREENS)
    return [[Cell("│"), *tabs]]


def _links(fleet: FleetState) -> list[list[Cell]]:
    """Return the links by phase, and a short form."""
    phases = Counter("live" if node.live else node.link.phase for node in fleet.nodes)
    live = Cell(f"│ ● {phases['live']}/{len(fleet.nodes)} live ", "good" if phases["live"] else "muted")
    cells = [live]
    if phases["connecting"]:
        cells.append(Cell(f"◌ {phases['connecting']} connecting ", "accent"))
    if phases["lost"]:
        cells.append(Cell(f"✗ {phases['lost']} lost ", "bad"))
    mark = Cell("✗", "bad") if phases["lost"] else Cell("●", "good")
    return [cells, [Cell("│ "), mark, Cell(f" {phases['live']}/{len(fleet.nodes)} live ", mark.tone)]]


def _instances(fleet: FleetState) -> list[list[Cell]]:
    states = Counter(i.state for node in fleet.nodes if node.live for i in node.instances)
    if not states:
        return []
    parts = [
        Cell(f"{STATE_MARKS[s].text} {states[s]} {s} ", STATE_MARKS[s].tone) for s in STATE_MARKS if states[s]
    ]
    return [[Cell("│ "), *parts]]


def notices(fleet: FleetState, now: Moment, limit: int = 3) -> list[tuple[Cell, ...]]:
    """Return what the operator must know about the data itself: the latest gaps, newest first."""
    found = sorted(_gaps(fleet, now), key=lambda item: -item[0])
    lines: list[tuple[Cell, ...]] = [(Cell(f" ! {text}", "warn"),) for _, text in found[:limit]]
    if (more := len(found) - limit) > 0:
        lines[-1] = (*lines[-1], Cell(f"  (+{more} more {noun(more, 'gap')})", "muted"))
    return lines


def _gaps(fleet: FleetState, now: Moment) -> Iterator[tuple[float, str]]:
    """Yield when each gap ended, and its text; instances of a node that miss the same time share one."""
    for node in fleet.nodes:
        shared: list[list[tuple[str, Gap]]] = []
        for gap, name in sorted(_recent(node, now), key=lambda item: (item[0].reason, item[0].from_ns)):
            if shared and _same(shared[-1], gap):
                shared[-1].append((name, gap))
            else:
                shared.append([(name, gap)])
        for group in shared:
            yield node.wall_s(max(gap.to_ns for _, gap in group)), gap_text(node, group)


def _recent(node: NodeState, now: Moment) -> Iterator[tuple[Gap, str]]:
    for instance in node.instances:
        for gap in instance.gaps:
            ago_s = node.age_s(gap.to_ns, now)
            if ago_s is not None and ago_s <= GAP_SHOWN_S:
                yield gap, instance.name


def _same(group: Sequence[tuple[str, Gap]], gap: Gap) -> bool:
    overlaps = gap.from_ns <= max(other.to_ns for _, other in group)
    return overlaps and gap.reason == group[0][1].reason


def gap_text(node: NodeState, group: Sequence[tuple[str, Gap]]) -> str:
    """Say for which span the events of these instances are missing, why, and how many."""
    names = list(dict.fromkeys(name for name, _ in group))
    who = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    start = fmt.clock_time(node.wall_s(min(gap.from_ns for _, gap in group)))
    end = fmt.clock_time(node.wall_s(max(gap.to_ns for _, gap in group)))
    known = [gap.dropped_events for _, gap in group if gap.dropped_events is not None]
    lost = f", {sum(known):,} {noun(sum(known), 'event')} lost" if known else ""
    return f"{who}: no data {start}–{end} ({group[0][1].reason}){lost}"
