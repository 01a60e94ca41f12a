"""Simulated engines that report as many transfers a second as wanted, in a process of their own.

The course of each transfer is fixed, so that the load costs little and its totals are known.
What they say goes through the real reporter and the real ingest protocol.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvtop.agents.events import (
    EngineStats,
    LatencySamples,
    Mark,
    Role,
    Side,
    Stage,
    TransferEvent,
)
from kvtop.agents.reporter import Reporter
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import hello

TICK_S: Final = 0.05
BLOCKS: Final = 40
BLOCK_BYTES: Final = 1 << 20
ITL_S: Final = [0.01 + 0.0001 * number for number in range(32)]
TTFT_S: Final = 0.4
COURSE: Final[dict[int, tuple[tuple[Side, Stage | Mark, dict[str, Any]], ...]]] = {
    0: (
        ("prefill", "queued", {"blocks": BLOCKS, "lease": True}),
        ("decode", "queued", {"blocks": BLOCKS, "peer": True}),
    ),
    1: (("decode", "allocated", {"peer": True}), ("decode", "registered", {})),
    3: (
        ("prefill", "matched", {"ranks_expected": 1, "peer": True}),
        ("prefill", "posting", {"ranks_expected": 1}),
    ),
    4: (("prefill", "on_wire", {"ranks_expected": 1}),),
    8: (
        (
            "prefill",
            "done",
            {
                "ranks_expected": 1,
                "bytes": BLOCKS * BLOCK_BYTES,
                "descriptors": BLOCKS,
                "post_us": 900.0,
                "wire_us": 190_000.0,
            },
        ),
        ("prefill", "released", {}),
        ("decode", "received", {}),
    ),
}
"""What is reported of a transfer at which tick after its begin."""
DECODED: Final = 16
"""The tick at which the last token of a request comes."""


class Sent(msgspec.Struct):
    """What a run has reported."""

    transfers: int
    events: int
    dropped: int
    seconds: float
    cpu_s: float


@dataclass
class _Pair:
    prefill: Reporter
    decode: Reporter
    ids: dict[Side, str]

    def of(self, side: Side) -> Reporter:
        return self.prefill if side == "prefill" else self.decode


@dataclass
class _Cohort:
    """The requests that began in one tick, by pair."""

    born: int
    requests: list[tuple[_Pair, list[str]]]


def run(paths: RuntimePaths, *, rate_per_s: float, seconds: float, pairs: int) -> Sent:
    """Report transfers, at `rate_per_s` over all pairs, until `seconds` have passed and all are done."""
    made = [_make_pair(paths, number) for number in range(pairs)]
    numbers = itertools.count()
    cohorts: deque[_Cohort] = deque()
    began_s, sent, transfers = time.monotonic(), 0, 0
    last = int(seconds / TICK_S)
    for tick in range(last + DECODED + 1):
        time.sleep(max(0.0, began_s + tick * TICK_S - time.monotonic()))
        if tick < last:
            count = int((tick + 1) * TICK_S * rate_per_s) - int(tick * TICK_S * rate_per_s)
            cohorts.append(_begin(tick, made, count, numbers))
            transfers += count
        for cohort in cohorts:
            sent += _step(cohort, tick - cohort.born)
        if cohorts and tick - cohorts[0].born >= DECODED:
            cohorts.popleft()
        for pair in made:
            for reporter in (pair.prefill, pair.decode):
                now_ns = time.monotonic_ns()
                reporter.put(EngineStats(at_ns=now_ns, running=len(cohorts), waiting=0, kv_usage=0.5))
    took_s = time.monotonic() - began_s
    reporters = [reporter for pair in made for reporter in (pair.prefill, pair.decode)]
    for reporter in reporters:
        reporter.close(30)
    dropped = sum(reporter.dropped_events for reporter in reporters)
    return Sent(transfers, sent, dropped, took_s, time.process_time())


def _make_pair(paths: RuntimePaths, number: int) -> _Pair:
    def reporter(role: Role) -> tuple[Reporter, str]:
        engine_id = f"simulated-{uuid.uuid4()}"
        made = Reporter(
            hello(f"sim-{role}-{number}", engine_id=engine_id, role=role, simulated=True),
            paths,
            start_agent=False,
        )
        made.start()
        return made, engine_id

    prefill, prefill_id = reporter("prefill")
    decode, decode_id = reporter("decode")
    return _Pair(prefill, decode, {"prefill": prefill_id, "decode": decode_id})


def _begin(tick: int, pairs: list[_Pair], count: int, numbers: Iterator[int]) -> _Cohort:
    shares = [count // len(pairs) + (position < count % len(pairs)) for position in range(len(pairs))]
    return _Cohort(
        tick,
        [
            (pair, [f"cmpl-{next(numbers):032x}-0" for _ in range(share)])
            for pair, share in zip(pairs, shares, strict=True)
        ],
    )


def _step(cohort: _Cohort, age: int) -> int:
    """Report what happens to a cohort at an age, in ticks; return how many events that took."""
    sent = 0
    now_ns = time.monotonic_ns()
    for side, step, facts in COURSE.get(age, ()):
        given = {**facts}
        lease, named = given.pop("lease", False), given.pop("peer", False)
        if lease:
            given["lease_deadline_ns"] = now_ns + 30_000_000_000
        other: Side = "decode" if side == "prefill" else "prefill"
        for pair, ids in cohort.requests:
            put = pair.of(side).put
            if named:
                given["peer_engine_id"] = pair.ids[other]
            for base in ids:
                if named:
                    given["peer_request_id"] = _request_id(base, other)
                put(
                    TransferEvent(
                        at_ns=now_ns,
                        side=side,
                        request_id=_request_id(base, side),
                        step=step,
                        direction="push",
                        **given,
                    )
                )
            sent += len(ids)
    if age in (8, DECODED):
        for pair, ids in cohort.requests:
            ttft, itl = ([TTFT_S] * len(ids), []) if age == 8 else ([], ITL_S * len(ids))
            if ids:
                pair.decode.put(LatencySamples(now_ns, ttft, itl))
                sent += 1
    return sent


def _request_id(base: str, side: Side) -> str:
    return f"{base}-0000000{'1' if side == 'prefill' else '2'}"


def main() -> None:
    """Report to the agent in a folder; print what was sent as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    sent = run(
        RuntimePaths.at(options.folder),
        rate_per_s=options.rate,
        seconds=options.seconds,
        pairs=options.pairs,
    )
    sys.stdout.write(msgspec.json.encode(sent).decode())


if __name__ == "__main__":
    main()
