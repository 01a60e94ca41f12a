"""The figures of a headless demo: what the client saw, and what the agent's ledger says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvtop.agents.model import LIVE_STAGES, Transfer
from kvtop.console.demo.load import Outcome

SCHEMA_VERSION: Final = 1
"""Version of the headless demo's JSON. Raised when a field changes meaning or goes away."""
ERRORS_SHOWN: Final = 5


def client_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how the requests went, and TTFT and ITL (seconds) as the client measured them."""
    good = [outcome for outcome in outcomes if outcome.ok]
    errors = Counter(outcome.error for outcome in outcomes if not outcome.ok)
    return {
        "ok": len(good),
        "failed": len(outcomes) - len(good),
        "errors": [error for error, _ in errors.most_common(ERRORS_SHOWN)],
        "ttft_s": _spread([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        "itl_s": _spread([gap for outcome in good for gap in outcome.itl_s]),
    }


def ledger_figures(transfers: Iterable[Transfer]) -> dict[str, Any]:
    """Return how many transfers ended how, and the sums over those that are done; None is unknown."""
    rows = list(transfers)
    stages = Counter(row.stage for row in rows)
    done = [row for row in rows if row.stage == "done"]
    return {
        "done": len(done),
        "failed": sum(
            count for stage, count in stages.items() if stage != "done" and stage not in LIVE_STAGES
        ),
        "live": sum(stages[stage] for stage in LIVE_STAGES),
        "push": sum(row.direction == "push" for row in done),
        "pull": sum(row.direction == "pull" for row in done),
        "bytes": _sum([row.bytes for row in done]),
        "descriptors": _sum([row.descriptors for row in done]),
    }


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank quantile, None where there are no values.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def as_text(figures: Mapping[str, Any]) -> str:
    """Return the figures for people, one to a line; what is unknown is –."""
    client, ledger = figures["client"], figures["transfers"]
    lines = [f"mode         {figures['mode']}{'   SIMULATED' if figures['simulated'] else ''}"]
    if client is not None:
        lines.append(f"requests     {client['ok']} ok, {client['failed']} failed")
        lines += [
            f"{name:<13}{_milliseconds(client[key])}" for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"))
        ]
        lines += [f"error        {error}" for error in client["errors"]]
    lines += [
        f"transfers    {ledger['done']} done, {ledger['failed']} failed, {ledger['live']} live",
        f"moved        {_count(ledger['bytes'])} bytes in {_count(ledger['descriptors'])} descriptors",
        f"start        {figures['startup_s']['total']:.1f} s",
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"count": len(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _milliseconds(spread: Mapping[str, Any]) -> str:
    shown = [
        f"{name} {'–' if spread[name] is None else f'{spread[name] * 1e3:.1f} ms'}" for name in ("p50", "p99")
    ]
    return ", ".join(shown)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
