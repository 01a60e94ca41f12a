"""KV transfers as a table: one line each, P and D joined, live ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from kvtop.agents.events import Stage
from kvtop.agents.model import LIVE_STAGES, Transfer
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import FleetState, NodeState, is_live
from kvtop.console.views import format as fmt
from kvtop.console.views.table import Cell, Column, Sort, Tone, ordered

STUCK_S = 10.0
"""A live transfer that is older, in its stage or in all, is marked: a healthy one takes seconds at most."""
LEASE_SHORT_S = 5.0
"""A lease with less than this left is marked."""

WAITING_S = 1.0
"""From when on blocks without a registration, or a registration without blocks, are worth a word."""

STAGE_MARKS: dict[str, Cell] = {
    "queued": Cell("○", "accent"),
    "registered": Cell("◔", "accent"),
    "matched": Cell("◑", "accent"),
    "handshaking": Cell("⇄", "accent"),
    "posting": Cell("◕", "accent"),
    "on_wire": Cell("▶", "accent"),
    "done": Cell("✓", "good"),
    "failed": Cell("✗", "bad"),
    "expired": Cell("✗", "bad"),
    "cancelled": Cell("⊘", "warn"),
    "quarantined": Cell("▣", "warn"),
}


class TransferRow(NamedTuple):
    """One transfer with the node whose clock its stamps are in."""

    node: NodeState
    transfer: Transfer

    @property
    def key(self) -> tuple[str, int, int]:
        """The transfer's identity: row ids are unique within one incarnation of an agent."""
        started_ns = self.node.node.agent_started_ns if self.node.node else 0
        return self.node.target, started_ns, self.transfer.id


class Limit(NamedTuple):
    """Which transfers to show: those of one node, or of one instance."""

    label: str
    target: str
    engine_id: str | None = None

    def takes(self, node: NodeState, transfer: Transfer) -> bool:
        """Whether a transfer is within the limit. An instance's transfers may be another node's to report."""
        if self.engine_id is None:
            return node.target == self.target
        return any(side and side.engine_id == self.engine_id for side in (transfer.prefill, transfer.decode))


def transfer_rows(
    fleet: FleetState,
    sort: Sort | None,
    columns: Sequence[Column[TransferRow]],
    now: Moment,
    limit: Limit | None = None,
) -> list[TransferRow]:
    """Return all transfers within the limit, live ones first, each part in the order of `sort`.

    Without a sort: live ones oldest first, finished ones newest first.
    """
    live: list[TransferRow] = []
    ended: list[TransferRow] = []
    for node in fleet.nodes:
        for transfer in node.transfers.values():
            if limit is None or limit.takes(node, transfer):
                (live if transfer.stage in LIVE_STAGES else ended).append(TransferRow(node, transfer))
    if sort is None:
        return _by(live, [row.transfer.first_seen_ns + row.node.wall_offset_ns for row in live]) + _by(
            ended, [-row.transfer.stage_since_ns - row.node.wall_offset_ns for row in ended]
        )
    return ordered(live, sort, columns, now) + ordered(ended, sort, columns, now)


def _by(rows: list[TransferRow], keys: list[int]) -> list[TransferRow]:
    return [rows[index] for index in sorted(range(len(rows)), key=keys.__getitem__)]


class Backlog(NamedTuple):
    """How many transfers are in which stage, and which of them wait for their other half."""

    depths: Counter[Stage]
    waiting: dict[str, list[Waiting]]
    """By what they wait for: blocks for a registration, or a registration for blocks. Push only."""


class Waiting(NamedTuple):
    """One node's transfers that wait for their other half."""

    node: NodeState
    transfers: int
    oldest_ns: int


_WAITS: dict[Stage, str] = {
    "queued": "blocks awaiting registration",
    "registered": "registered, awaiting blocks",
}


def backlog(fleet: FleetState, limit: Limit | None = None) -> Backlog:
    """Count the transfers within the limit."""
    depths: Counter[Stage] = Counter()
    waiting: dict[str, list[Waiting]] = {}
    for node in fleet.nodes:
        of_node = [t for t in node.transfers.values() if limit is None or limit.takes(node, t)]
        stages = Counter(map(attrgetter("stage"), of_node))
        depths += stages
        for stage, text in _WAITS.items():
            if stages[stage]:
                stamps = [t.stage_since_ns for t in of_node if t.stage == stage and t.direction != "pull"]
                if stamps:
                    waiting.setdefault(text, []).append(Waiting(node, len(stamps), min(stamps)))
    return Backlog(depths, waiting)


def summary(of: Backlog, now: Moment, limit: Limit | None = None) -> tuple[Cell, ...]:
    """Return the line above the table: the two queues that wait for each other, and live ones by stage."""
    cells = [Cell(f"only {limit.label} (Esc: all) · ", "warn")] if limit else []
    live = sum(of.depths[stage] for stage in LIVE_STAGES)
    cells.append(Cell(f"live {live}", "strong"))
    for text, nodes in of.waiting.items():
        oldest_s = max(each.node.age_s(each.oldest_ns, now) or 0.0 for each in nodes)
        if oldest_s >= WAITING_S:
            tone: Tone = "warn" if oldest_s >= STUCK_S else ""
            cells.append(
                Cell(f" · {text}: {sum(each.transfers for each in nodes)} (oldest {fmt.age(oldest_s)})", tone)
            )
    present = [stage for stage in LIVE_STAGES if of.depths[stage]]
    cells += [Cell(f" · {STAGE_MARKS[stage].text} {stage} {of.depths[stage]}", "accent") for stage in present]
    cells.append(Cell(f" · finished {of.depths.total() - live}", "muted"))
    return tuple(cells)


def find(fleet: FleetState, key: tuple[str, int, int]) -> TransferRow | None:
    """Return the transfer of that identity, None where no agent holds it any more."""
    for node in fleet.nodes:
        if node.target == key[0] and (transfer := node.transfers.get(key[2])):
            row = TransferRow(node, transfer)
            return row if row.key == key else None
    return None


def empty_lines(fleet: FleetState) -> list[tuple[Cell, ...]]:
    """Say why there is no transfer and what to do."""
    if not any(node.live for node in fleet.nodes):
        return [(Cell("no agent is connected: the Fleet screen (1) says why", "warn"),)]
    if not any(node.instances for node in fleet.nodes):
        text = "no engine has attached to an agent yet: start vLLM with KvtopConnector"
        return [(Cell(text, "muted"),)]
    return [
        (Cell("no KV transfer yet.", "muted"),),
        (Cell("Send a request through the router; a prompt shorter than one block moves nothing.", "muted"),),
    ]


def rate_bytes_per_s(transfer: Transfer) -> float | None:
    """Return payload bytes per second of NIXL's transfer time, None unless both are known."""
    if transfer.bytes is None or not transfer.wire_us:
        return None
    return transfer.bytes / (transfer.wire_us / 1e6)


def descriptors_per_block(transfer: Transfer) -> float | None:
    """Return into how many pieces NIXL had to cut each KV block, None unless known.

    Each layer of a block is a piece, and runs of neighbouring blocks are merged: below the number of layers,
    blocks lay together. With several ranks the pieces of all of them count.
    """
    if transfer.descriptors is None or not transfer.blocks:
        return None
    return transfer.descriptors / transfer.blocks


def post_share(transfer: Transfer) -> float | None:
    """Return which share of NIXL's transfer time was spent on posting the descriptors, None unless known."""
    if transfer.post_us is None or not transfer.wire_us:
        return None
    return transfer.post_us / transfer.wire_us


def endpoints(transfer: Transfer) -> str:
    """Return `P→D` by the instances' names."""
    prefill = transfer.prefill.name if transfer.prefill else fmt.UNKNOWN
    decode = transfer.decode.name if transfer.decode else fmt.UNKNOWN
    return f"{prefill}→{decode}"


def request_id(transfer: Transfer) -> str | None:
    """Return the decode side's request id, else the prefill side's."""
    for side in (transfer.decode, transfer.prefill):
        if side and side.request_id:
            return side.request_id
    return None


def lease_s(row: TransferRow, now: Moment) -> float | None:
    """Return the seconds left of a live transfer's lease."""
    if row.transfer.lease_deadline_ns is None or not is_live(row.transfer):
        return None
    return (row.transfer.lease_deadline_ns - row.node.now_ns(now)) / 1e9


def stage_cell(stage: Stage) -> Cell:
    """Return a stage as mark and word."""
    mark = STAGE_MARKS[stage]
    return Cell(f"{mark.text} {stage}", mark.tone)
