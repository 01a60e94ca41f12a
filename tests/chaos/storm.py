"""Requests that must be answered rightly, while actions at random fall on the pair that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import httpx

from kvtop.agents.act import Command, Outcome
from kvtop.agents.client import connect_unix
from kvtop.agents.model import LIVE_STAGES
from kvtop.agents.runtime import RuntimePaths
from kvtop.console.demo.load import Prompt
from tests.support.pair import Completion, RunningPair, complete
from tests.support.two_steps import Handed, decode, decode_and_leave, prefill

IN_FLIGHT: Final = 4
PAUSE_S: Final = (0.05, 0.4)
"""Between two actions: drawn between these, in seconds."""
LEAVING: Final = 0.05
"""Share of requests whose client hangs up before D has answered."""
IN_TWO_STEPS: Final = 0.3
"""Share of requests that are sent to P and D one after the other, not both at once by the router."""
STUCK_S: Final = 60.0


@dataclass
class Summary:
    """What was done, and what came of it."""

    seed: int
    asked: int
    right: int = 0
    wrong: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    left: int = 0
    """Requests whose client hung up, as was intended."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that got an error, by what was said; each was asked again."""
    actions: Counter[str] = field(default_factory=Counter)
    """Actions by verb and outcome."""
    transfers: Counter[str] = field(default_factory=Counter)
    """The ledger's rows by direction and stage, as far as it still has them."""
    took_s: float = 0.0

    def __str__(self) -> str:
        """Return the summary for a person."""
        actions = ", ".join(f"{name} {count}" for name, count in sorted(self.actions.items()))
        transfers = ", ".join(f"{count} {name}" for name, count in sorted(self.transfers.items()))
        failed = ", ".join(f"{count} x {what}" for what, count in self.failed.items()) or "none"
        return (
            f"seed {self.seed}: {self.asked} requests in {self.took_s:.0f} s: {self.right} right, "
            f"{len(self.wrong)} wrong, {len(self.stuck)} stuck, {self.left} left by their client\n"
            f"errors that were asked again: {failed}\nactions: {actions}\ntransfers: {transfers}"
        )


class Storm:
    """One run on one pair; the same seed draws the same requests and the same actions."""

    def __init__(self, pair: RunningPair, seed: int) -> None:
        """Prepare to trouble `pair`."""
        self._pair = pair
        self._seed = seed
        self._actions = random.Random(f"actions {seed}")
        self._over = threading.Event()
        self._count = threading.Lock()

    def run(
        self,
        prompts: Sequence[Prompt],
        expected: Sequence[Completion],
        *,
        disaster: Callable[[], None] = lambda: None,
    ) -> Summary:
        """Have all prompts completed in the storm; `disaster` is called when half of them are answered."""
        self.summary = Summary(self._seed, len(prompts))
        started = time.monotonic()
        self._answered = 0
        operator = threading.Thread(target=self._act_until_over)
        operator.start()
        try:
            with ThreadPoolExecutor(IN_FLIGHT) as clients:
                asked = [
                    clients.submit(self._ask, number, prompt, expected[number])
                    for number, prompt in enumerate(prompts)
                ]
                while self._answered < len(prompts) // 2 and not all(each.done() for each in asked):
                    time.sleep(0.05)
                disaster()
                for each in asked:
                    each.result()
        finally:
            self._over.set()
            operator.join()
        for instance in self._pair.instances().values():
            self._act(Command(verb="undrain", targets=[instance.engine_id]))
            self._act(Command(verb="mode", targets=[instance.engine_id], arguments={"mode": "push"}))
        rows = self._pair.snapshot().transfers
        self.summary.transfers.update(f"{row.direction} {row.stage}" for row in rows)
        self.summary.took_s = time.monotonic() - started
        return self.summary

    # Clients.

    def _ask(self, number: int, prompt: Prompt, expected: Completion) -> None:
        draw = random.Random(f"request {self._seed} {number}")
        leaves, in_two_steps = draw.random() < LEAVING, draw.random() < IN_TWO_STEPS
        try:
            if leaves:
                self._leave(prompt, after_s=draw.uniform(0.01, 0.3))
                return
            answer = self._insist(number, prompt, in_two_steps=in_two_steps)
        finally:
            with self._count:
                self._answered += 1
        with self._count:
            if answer is None:
                self.summary.stuck.append(number)
            elif answer == expected:
                self.summary.right += 1
            else:
                self.summary.wrong.append(number)

    def _leave(self, prompt: Prompt, *, after_s: float) -> None:
        servers = self._pair.pair
        # The answer may be quicker than the client's patience, or an engine may be being started again.
        with contextlib.suppress(AssertionError, httpx.HTTPError):
            decode_and_leave(servers.decode, prefill(servers.prefill, prompt), after_s=after_s)
        with self._count:
            self.summary.left += 1

    def _insist(self, number: int, prompt: Prompt, *, in_two_steps: bool) -> Completion | None:
        """Ask until there is an answer; None if a request gets none within `STUCK_S`."""
        deadline = time.monotonic() + 10 * STUCK_S
        while time.monotonic() < deadline:
            try:
                return self._in_two_steps(prompt) if in_two_steps else complete(self._pair.url, prompt)
            except httpx.TimeoutException:
                return None
            except (httpx.HTTPError, AssertionError) as error:
                with self._count:
                    self.summary.failed[str(error).partition("\n")[0][:80] or type(error).__name__] += 1
                time.sleep(0.5)  # as a client would that tries again
        return None

    def _in_two_steps(self, prompt: Prompt) -> Completion:
        handed: Handed = prefill(self._pair.pair.prefill, prompt)
        return decode(self._pair.pair.decode, handed)

    # Operators.

    def _act_until_over(self) -> None:
        while not self._over.wait(self._actions.uniform(*PAUSE_S)):
            try:
                self._act(self._draw())
            except (OSError, KeyError, IndexError) as error:
                self.summary.actions[f"not tried ({type(error).__name__})"] += 1

    def _draw(self) -> Command:
        """Draw the next action; what it falls on is drawn from what is there."""
        snapshot = self._pair.snapshot()
        serving = sorted(
            (each for each in snapshot.instances if each.orders), key=lambda each: (each.role, each.name)
        )
        target = self._actions.choice(serving)
        verb = self._actions.choices(("mode", "drain", "undrain", "cancel", "evict"), (5, 2, 3, 4, 1))[0]
        live = [str(row.id) for row in snapshot.transfers if row.stage in LIVE_STAGES]
        if verb == "mode":
            return Command(
                verb=verb,
                targets=[target.engine_id],
                arguments={"mode": self._actions.choice(("push", "pull"))},
            )
        if verb == "evict":
            peers = [each.engine_id for each in serving if each.role != target.role]
            return Command(verb=verb, targets=[target.engine_id], arguments={"peer": peers[0]})
        if verb == "cancel":
            return Command(verb=verb, targets=[self._actions.choice(live)])
        return Command(verb=verb, targets=[target.engine_id], force=True)

    def _act(self, command: Command) -> None:
        outcome = asyncio.run(act(self._pair, command))
        self.summary.actions[f"{command.verb} {outcome.state}"] += 1


async def act(pair: RunningPair, command: Command) -> Outcome:
    """Have a pair's agent run a command, and return how it ended."""
    async with await connect_unix(RuntimePaths.at(pair.runtime_dir).operate) as agent:
        async for answer in agent.act(command):
            if isinstance(answer, Outcome):
                return answer
    raise ConnectionResetError("the agent did not say how the command ended")


def idle(pair: RunningPair) -> bool:
    """Whether nothing runs, and no KV block is in use or in quarantine."""
    return all(
        not (each.kv_usage or each.quarantined_blocks or each.blockers or each.running or each.waiting)
        for each in pair.instances().values()
    )
