"""One answer from each target, printed once: as JSON for scripts or as plain tables for people."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvtop.agents.model import SCHEMA_VERSION, Snapshot, Transfer
from kvtop.console.clock import Moment, SystemClock
from kvtop.console.fleet.conversation import Dial, DialOptions
from kvtop.console.fleet.dial import dialler
from kvtop.console.fleet.errors import ConnectError
from kvtop.console.fleet.state import FleetState, LinkState, NodeState
from kvtop.console.fleet.targets import Target
from kvtop.console.views import fleet_columns, transfer_columns
from kvtop.console.views.fleet_rows import fleet_rows, no_engine_text
from kvtop.console.views.table import plain_lines
from kvtop.console.views.transfer_rows import descriptors_per_block, post_share, transfer_rows

CONCURRENT = 64
"""How many targets are asked at the same time."""

Answer = NodeState | ConnectError


async def ask_all(targets: Sequence[Target], options: DialOptions) -> list[Answer]:
    """Ask each target for a snapshot; what a target's answer is does not depend on the others."""
    dial = dialler(options)
    places = asyncio.Semaphore(CONCURRENT)

    async def ask(target: Target) -> Answer:
        async with places:
            try:
                async with asyncio.timeout(options.timeout_s):
                    return await _ask(target, dial)
            except ConnectError as error:
                return error
            except TimeoutError:
                what = f"the agent sent no snapshot within {options.timeout_s:g} s"
                return ConnectError(target.label, "no-answer", what, "is its node overloaded?")

    return list(await asyncio.gather(*(ask(target) for target in targets)))


async def _ask(target: Target, dial: Dial) -> NodeState:
    conversation = await dial(target)
    try:
        return _answer(target, await conversation.snapshot())
    finally:
        await conversation.aclose()


def _answer(target: Target, message: Snapshot) -> NodeState:
    now = SystemClock().now()
    return NodeState(
        target=target.label,
        link=LinkState("live", now.wall_s),
        node=message.node,
        instances=tuple(message.instances),
        transfers={transfer.id: transfer for transfer in message.transfers},
        received=now,
        host=message.host,
    )


def as_json(answers: Sequence[Answer]) -> str:
    """Return all answers as one JSON document; a target that failed has `error` instead of data."""
    document = {"schema_version": SCHEMA_VERSION, "nodes": [_as_dict(answer) for answer in answers]}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _as_dict(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, ConnectError):
        return {"target": answer.target, "error": {"kind": answer.kind, "message": str(answer)}}
    return {
        "target": answer.target,
        "node": answer.node,
        "host": answer.host,
        "instances": answer.instances,
        "transfers": [_with_ratios(transfer) for transfer in answer.transfers.values()],
    }


def _with_ratios(transfer: Transfer) -> dict[str, Any]:
    """Return a transfer's fields, and what the console derives from them."""
    ratios = {"descriptors_per_block": descriptors_per_block(transfer), "post_share": post_share(transfer)}
    return {**msgspec.structs.asdict(transfer), **ratios}


def as_text(what: str, answers: Sequence[Answer]) -> str:
    """Return the table of the targets that answered; the empty text where none did."""
    fleet = FleetState([answer for answer in answers if isinstance(answer, NodeState)])
    if not fleet.nodes:
        return ""
    lines = _transfer_lines if what == "transfers" else _status_lines
    return "\n".join(lines(fleet, SystemClock().now())) + "\n"


def _status_lines(fleet: FleetState, now: Moment) -> Iterator[str]:
    if fleet.simulated:
        yield "SIMULATED: rows marked SIM come from simulated engines"
    table = fleet_columns.fleet_table(fleet)
    yield from plain_lines(table, fleet_rows(fleet, None, table.columns, now), now)


def _transfer_lines(fleet: FleetState, now: Moment) -> Iterator[str]:
    if fleet.simulated:
        yield "SIMULATED: rows marked SIM come from simulated engines"
    table = transfer_columns.transfer_table(fleet)
    yield from plain_lines(table, transfer_rows(fleet, None, table.columns, now), now)
    for node in fleet.nodes:
        if not node.instances:
            yield no_engine_text(node)


def report_errors(answers: Sequence[Answer]) -> int:
    """Write one line for each target that failed to stderr; return the exit code."""
    errors = [answer for answer in answers if isinstance(answer, ConnectError)]
    for error in errors:
        sys.stderr.write(f"kvtop: {error}\n")
    return ConnectError.exit_code if errors else 0
