"""One transfer in full: who, what, and the waterfall of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtop.agents.model import Endpoint, Transfer
from kvtop.agents.text import noun
from kvtop.console.clock import Moment
from kvtop.console.fleet.state import is_live
from kvtop.console.views import format as fmt
from kvtop.console.views import transfer_rows as rows
from kvtop.console.views.table import Cell, padded
from kvtop.console.views.transfer_rows import STAGE_MARKS, TransferRow

_LABEL = 13
_BAR_LEFT = 51


def detail(row: TransferRow, now: Moment, width: int) -> list[tuple[Cell, ...]]:
    """Return the lines of a transfer's own screen."""
    return [*_facts(row, now), (), *waterfall(row, now, width)]


def _facts(row: TransferRow, now: Moment) -> Iterator[tuple[Cell, ...]]:
    transfer = row.transfer
    simulated = [Cell("  "), Cell(" SIMULATED ", "badge")] if transfer.simulated else []
    age = fmt.age(row.node.age_s(transfer.stage_since_ns, now))
    stage = rows.stage_cell(transfer.stage)
    yield (Cell(f" transfer {transfer.id} on {row.node.target}", "strong"), *simulated)
    yield ()
    yield _fact("stage", stage, Cell(f" for {age}" if is_live(transfer) else f" {age} ago", "muted"))
    if transfer.error or transfer.error_class:
        yield _fact("error", Cell(f"{transfer.error_class or 'other'}: {transfer.error or 'no text'}", "bad"))
    yield _fact("direction", Cell(_direction(transfer), transfer.direction or "muted"))
    yield _fact("prefill", *_endpoint(transfer.prefill))
    yield _fact("decode", *_endpoint(transfer.decode))
    if is_live(transfer):
        yield _fact("lease left", Cell(fmt.countdown(rows.lease_s(row, now))))
    expected = fmt.UNKNOWN if transfer.ranks_expected is None else str(transfer.ranks_expected)
    yield _fact("ranks", Cell(f"{transfer.ranks_done} of {expected} done"))
    yield _fact("payload", Cell(_payload(transfer)))
    yield _fact("NIXL time", Cell(_nixl(transfer)))
    yield _fact("fragments", Cell(_fragments(transfer)))


def _fact(label: str, *cells: Cell) -> tuple[Cell, ...]:
    return (Cell(f" {padded(label, _LABEL)}", "muted"), *cells)


def _direction(transfer: Transfer) -> str:
    how = {"push": "push (prefill writes)", "pull": "pull (decode reads)"}
    return how[transfer.direction] if transfer.direction else fmt.UNKNOWN


def _endpoint(side: Endpoint | None) -> tuple[Cell, ...]:
    if side is None:
        return (Cell(f"{fmt.UNKNOWN} (this side has not reported)", "muted"),)
    return (
        Cell(side.name, "strong"),
        Cell(f"  request {side.request_id or fmt.UNKNOWN}"),
        Cell(f"  engine {side.engine_id}", "muted"),
    )


def _payload(transfer: Transfer) -> str:
    total = "" if transfer.bytes is None else f" ({transfer.bytes:,} bytes)"
    counts = ((transfer.blocks, "block"), (transfer.descriptors, "descriptor"))
    parts = ", ".join(f"{fmt.count(count)} {noun(count, of)}" for count, of in counts)
    return f"{fmt.size(transfer.bytes)}{total} in {parts}"


def _nixl(transfer: Transfer) -> str:
    rate = fmt.size(rows.rate_bytes_per_s(transfer))
    post, wire = fmt.microseconds(transfer.post_us), fmt.microseconds(transfer.wire_us)
    return f"post {post}, transfer {wire}, {rate}/s (slowest rank; bytes of all ranks)"


def _fragments(transfer: Transfer) -> str:
    pieces = fmt.ratio(rows.descriptors_per_block(transfer))
    return f"{pieces} descriptors per block, post/wire {fmt.share(rows.post_share(transfer))}"


def waterfall(row: TransferRow, now: Moment, width: int) -> list[tuple[Cell, ...]]:
    """Return each step with its time of day, the time since the step before, and a bar from step to step."""
    transfer, node = row.transfer, row.node
    steps = sorted(transfer.times_ns.items(), key=lambda item: (item[1], _rank(item[0])))
    if not steps:
        return [(Cell(" no step has a known time", "muted"),)]
    start_ns = steps[0][1]
    end_ns = node.now_ns(now) if is_live(transfer) else steps[-1][1]
    bar = max(8, width - _BAR_LEFT - 2)
    span_ns = max(1, end_ns - start_ns)
    titles = f" {'step':14} {'at':12} {'after':>8} {'total':>8}"
    lines: list[tuple[Cell, ...]] = [(Cell(titles, "muted"),)]
    ends = [at for _, at in steps[1:]] + [end_ns]
    previous = [None, *(at for _, at in steps)]
    for (step, at), until, before in zip(steps, ends, previous, strict=False):
        mark = STAGE_MARKS.get(step, Cell("·", "muted"))
        after = "" if before is None else fmt.duration((at - before) / 1e9)
        left = f" {mark.text} {padded(step, 12)} {fmt.clock_time(node.wall_s(at), millis=True)}"
        times = (
            f" {padded(after, 8, right=True)} {padded(fmt.duration((at - start_ns) / 1e9), 8, right=True)}  "
        )
        first, last = (round((t - start_ns) / span_ns * bar) for t in (at, until))
        block = "█" * (last - first) or "▏"
        lines.append(
            (Cell(left, mark.tone), Cell(times), Cell(" " * first), Cell(block, mark.tone or "accent"))
        )
    return [*lines, (), _longest(steps, end_ns)]


def _rank(step: str) -> int:
    names: Sequence[str] = list(STAGE_MARKS)
    return names.index(step) if step in names else len(names)


def _longest(steps: Sequence[tuple[str, int]], end_ns: int) -> tuple[Cell, ...]:
    spans = [(b[1] - a[1], a[0], b[0]) for a, b in pairwise([*steps, ("now", end_ns)])]
    longest, start, end = max(spans)
    if longest <= 0:
        return ()
    until = f"{start} → {end}"
    return (Cell(f" longest: {until}, {fmt.duration(longest / 1e9)}", "muted"),)
