"""One simulated request: its course is drawn when it arrives, and ends early where somebody cancels it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvtop.agents.events import (
    Blocker,
    Direction,
    ErrorClass,
    LatencySamples,
    Mark,
    Side,
    Stage,
    TransferEvent,
)
from kvtop.agents.row import is_end
from kvtop.agents.simulated_engine import SimulatedEngine

NS: Final = 1_000_000_000
BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = 2 << 20
LEASE_S: Final = 30.0
EXPIRING_LEASE_S: Final = 2.0
"""The lease of a transfer that is to expire: nobody waits half a minute to see one."""
EXPIRY_NOTICED_S: Final = 0.05
FAILURES: Final[tuple[ErrorClass, ...]] = ("handshake", "transport", "expiry")
WIRE_BYTES_PER_S: Final = (0.2e9, 2e9)
HANDSHAKE_SHARE: Final = 0.1
SIDES: Final[tuple[Side, ...]] = ("prefill", "decode")
At = Callable[[int, Callable[[], None]], None]
"""Has an action taken at a time of CLOCK_MONOTONIC, in ns."""


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance that work together."""

    prefill: SimulatedEngine
    decode: SimulatedEngine


class Request:
    """One simulated request's course, drawn when it arrives."""

    def __init__(self, rng: random.Random, pair: Pair, failure_rate: float) -> None:
        """Draw what becomes of a request to `pair`."""
        self._random = rng
        self._pair = pair
        self._mode: Direction = pair.prefill.mode_with(pair.decode)
        self._posted = self._handshakes = False
        self._over = False
        """Whether nothing of the transfer is reported any more but the end of a quarantine."""
        self._failure = rng.choice(FAILURES) if rng.random() < failure_rate else None
        base = f"cmpl-{rng.getrandbits(64):016x}-0"
        self.ids: dict[Side, str] = {side: f"{base}-{rng.getrandbits(32):08x}" for side in SIDES}
        self._tokens = int(rng.lognormvariate(6.5, 0.8))
        self._blocks = max(1, self._tokens // BLOCK_TOKENS)

    def plan(self, at_ns: int, at: At) -> int:
        """Put the request's steps into the schedule; return when its transfer is over."""
        course = _Course(self, at_ns, at)
        self._plan(course)
        if self._failure is None:
            self._plan_decoding(at_ns, course.at_ns, at)
        return course.at_ns

    def _plan(self, course: _Course) -> None:
        rng, mode, prefill, decode = self._random, self._mode, self._pair.prefill, self._pair.decode
        initiator: Side = "prefill" if mode == "push" else "decode"
        course.load(prefill, 1, 0)
        course.wait(0.02 + self._tokens * 40e-6 * rng.uniform(0.8, 1.3))
        lease_s = EXPIRING_LEASE_S if self._failure == "expiry" else LEASE_S
        lease_end_ns = course.at_ns + int((lease_s + EXPIRY_NOTICED_S) * NS)
        course.step("prefill", "queued", blocks=self._blocks, lease_s=lease_s)
        course.load(prefill, -1, self._blocks)
        course.wait(rng.uniform(0.001, 0.01))
        course.step("decode", "queued", **self._peer_of("decode"))
        course.load(decode, 1, self._blocks)
        if self._failure == "expiry":  # D has no room for it in time
            course.at_ns = lease_end_ns
            self._plan_failure(course, "prefill", "expired")
            return
        course.wait(rng.expovariate(4))
        course.step("decode", "allocated", **self._peer_of("decode"))
        if mode == "push":
            course.step("decode", "registered")
        course.wait(rng.expovariate(8))
        learnt = self._peer_of("prefill") if mode == "push" else {}
        course.step(initiator, "matched", ranks_expected=1, **learnt)
        anew = not (prefill.has_met(decode) and decode.has_met(prefill))
        by_chance, takes_s = rng.random() < HANDSHAKE_SHARE, rng.uniform(0.05, 0.5)
        if self._failure == "handshake" or by_chance or anew:
            self._handshakes = True
            course.step(initiator, "handshaking")
            course.wait(takes_s)
        if self._failure == "handshake":
            self._plan_failure(course, initiator, "failed")
            return
        self._plan_transfer(course, initiator)

    def _plan_transfer(self, course: _Course, initiator: Side) -> None:
        wire_s = self._blocks * BLOCK_BYTES / self._random.uniform(*WIRE_BYTES_PER_S)
        post_s = wire_s * self._random.uniform(0.02, 0.15)
        course.step(initiator, "posting", ranks_expected=1)
        course.wait(post_s)
        course.step(initiator, "on_wire", ranks_expected=1)
        course.wait(wire_s - post_s)
        if self._failure == "transport":
            self._plan_failure(course, initiator, "failed")
            return
        course.step(
            initiator,
            "done",
            ranks_expected=1,
            bytes=self._blocks * BLOCK_BYTES,
            descriptors=max(1, int(self._blocks * self._random.uniform(0.2, 1.0))),
            post_us=post_s * 1e6,
            wire_us=wire_s * 1e6,
        )
        course.wait(0.001)
        course.step("prefill", "released")
        course.step("decode", "received")
        course.load(self._pair.prefill, 0, -self._blocks)

    def _plan_failure(self, course: _Course, side: Side, end: Stage) -> None:
        error = "the lease ended first" if end == "expired" else f"the {self._failure} failed"
        course.step(side, end, error_class=self._failure, error=f"simulated: {error}")
        course.load(self._pair.prefill, 0, -self._blocks)
        course.load(self._pair.decode, -1, -self._blocks)

    def _peer_of(self, side: Side) -> dict[str, Any]:
        """Return what a side says of its peer, as kvtop's connector does."""
        peer = self._pair.decode if side == "prefill" else self._pair.prefill
        request_id = self.ids["decode" if side == "prefill" else "prefill"]
        return {"peer_engine_id": peer.engine_id, "peer_request_id": request_id}

    def _plan_decoding(self, at_ns: int, from_ns: int, at: At) -> None:
        """Report the first token, then the gaps between the others."""
        decode, rng = self._pair.decode, self._random
        first_ns = from_ns + int(rng.uniform(0.008, 0.02) * NS)
        gaps_s = [rng.gammavariate(8, 0.0025) for _ in range(rng.randint(8, 64))]
        ttft_s = (first_ns - at_ns) / NS
        at(first_ns, lambda: decode.put(LatencySamples(time.monotonic_ns(), [ttft_s], [])))
        end_ns = first_ns + int(sum(gaps_s) * NS)

        def end() -> None:
            decode.put(LatencySamples(time.monotonic_ns(), [], gaps_s))
            decode.change_load(-1, -self._blocks)

        at(end_ns, end)

    def take_step(self, side: Side, step: Stage | Mark, facts: dict[str, Any]) -> None:
        """Take one step, unless the transfer was cancelled or never begun, and report it."""
        if not self._over and step == "queued" and self._engine(side).draining:
            self._over = True
            if side == "decode":  # it computes by itself, and P's blocks are not wanted any more
                self._unblock()
                self._report("decode", "skipped", self._peer_of("decode"))
                self._report("prefill", "released", {})
        if self._over:
            if step == "done" or is_end(step):
                self._settle()
            return
        self._posted |= step == "posting"
        self._block(side, step)
        self._meet(side, step, facts)
        self._report(side, step, facts)

    def _meet(self, side: Side, step: Stage | Mark, facts: dict[str, Any]) -> None:
        """Have the engines note how it is between them."""
        if step == "posting" and self._handshakes:
            self._pair.prefill.note_pair(self._pair.decode.engine_id, "ready")
            self._pair.decode.note_pair(self._pair.prefill.engine_id, "ready")
        elif facts.get("error_class") == "handshake":
            other = self._engine("decode" if side == "prefill" else "prefill")
            self._engine(side).note_pair(other.engine_id, "failed", str(facts["error"]))

    def _block(self, side: Side, step: Stage | Mark) -> None:
        """Keep account of what of this request keeps its engines from being drained."""
        mine = self._engine(side).blocking
        if is_end(step):
            self._unblock()
        elif step == "queued":
            waits: Blocker = "registrations" if self._mode == "push" else "reads"
            mine[self.ids[side]] = "leases" if side == "prefill" else waits
        elif step == "posting":
            mine[self.ids[side]] = "writes" if self._mode == "push" else "reads"
        elif step in ("released", "received"):
            mine.pop(self.ids[side], None)

    def _unblock(self) -> None:
        for side in SIDES:
            self._engine(side).blocking.pop(self.ids[side], None)

    def cancel(self, side: Side) -> tuple[bool, str]:
        """End the transfer as an operator wants it; what is posted stays in quarantine until it has ended."""
        if not self._over and self.ids[side] not in self._engine(side).blocking:
            return False, "this side has nothing to cancel: it has not begun, or has ended"
        if not self._over:
            self._over = True
            facts = {"error_class": "cancel", "error": "simulated: cancelled by an operator"}
            self._report(side, "cancelled", dict(facts))
            self._unblock()
            if self._posted:
                self._report("decode", "quarantined", dict(facts))
                self._pair.decode.blocking[self.ids["decode"]] = "quarantine"
                self._pair.decode.quarantined[self.ids["decode"]] = (self._blocks, time.monotonic_ns())
        return True, "cancelled; its blocks stay in quarantine" if self._posted else "cancelled"

    def _settle(self) -> None:
        """End a quarantine: nothing can be written any more."""
        self._pair.decode.quarantined.pop(self.ids["decode"], None)
        if self._pair.decode.blocking.pop(self.ids["decode"], None):
            self._report("decode", "settled", {})

    def _engine(self, side: Side) -> SimulatedEngine:
        return self._pair.prefill if side == "prefill" else self._pair.decode

    def _report(self, side: Side, step: Stage | Mark, facts: dict[str, Any]) -> None:
        engine = self._engine(side)
        now_ns = time.monotonic_ns()
        lease_s = facts.pop("lease_s", None)
        if lease_s is not None:
            facts["lease_deadline_ns"] = now_ns + int(lease_s * NS)
        engine.put(
            TransferEvent(
                at_ns=now_ns,
                side=side,
                request_id=self.ids[side],
                step=step,
                direction=self._mode,
                **facts,
            )
        )


class _Course:
    """Plans a request's steps one after the other."""

    def __init__(self, request: Request, at_ns: int, at: At) -> None:
        self._request = request
        self._at = at
        self.at_ns = at_ns

    def wait(self, duration_s: float) -> None:
        """Let time pass before the next step."""
        self.at_ns += int(duration_s * NS)

    def step(self, side: Side, step: Stage | Mark, **facts: Any) -> None:
        """Plan a step at this point."""
        self._at(self.at_ns, lambda: self._request.take_step(side, step, facts))

    def load(self, engine: SimulatedEngine, running: int, blocks: int) -> None:
        """Plan a change of an engine's load at this point."""
        self._at(self.at_ns, lambda: engine.change_load(running, blocks))
