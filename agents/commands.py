"""The registry of what an agent can be asked to do, and the one way in which each of them is done.

The terminal UI, `kvtop …`, `kvtop-agent …` and scripts through SSH all come here. A command is checked,
planned, carried out and recorded; it is a task of the agent's, which the client that asked may leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from kvtop.agents.act import DONE, FAILED, MAX_NAME, MAX_TARGETS, Answer, Command, Outcome, OutcomeState, Plan
from kvtop.agents.audit import AuditLog
from kvtop.agents.errand import Errand, checked
from kvtop.agents.refusals import Refusals
from kvtop.agents.scene import Forbidden, Misnamed, Scene, Unfit
from kvtop.agents.text import plural
from kvtop.agents.verb_cancel import Cancel
from kvtop.agents.verb_drain import Drain, Undrain
from kvtop.agents.verb_evict import Evict
from kvtop.agents.verb_mode import Switch
from kvtop.agents.who import Who

logger = logging.getLogger("kvtop.agent")

VERBS: Final[Mapping[str, type[Errand]]] = {
    "mode": Switch,
    "drain": Drain,
    "undrain": Undrain,
    "cancel": Cancel,
    "evict": Evict,
}
KEYS_KEPT: Final = 1000
SHORT: Final = 64
"""Most characters of a name in the record of a client that may only look."""
RUNS_AT_ONCE: Final = 64
ANSWERS_KEPT: Final = 64
"""Of one command; a client that reads too slowly misses progress, never the plan or the outcome."""


class Run:
    """One command under way or ended, for whoever follows it."""

    def __init__(self, command: Command) -> None:
        """Begin with nothing said."""
        self.command = command
        self.plan: Plan | None = None
        self.outcome: Outcome | None = None
        self._answers: deque[Answer] = deque(maxlen=ANSWERS_KEPT)
        self._count = 0
        self._news = asyncio.Event()

    def say(self, answer: Answer) -> None:
        """Tell all that follow."""
        if isinstance(answer, Plan):
            self.plan = answer
        if isinstance(answer, Outcome):
            self.outcome = answer
        self._answers.append(answer)
        self._count += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self) -> AsyncIterator[Answer]:
        """Yield what was said and is said, to the outcome."""
        told = 0
        if self.plan is not None and self.plan not in self._answers:
            yield self.plan
        while True:
            news, fresh = self._news, list(self._answers)
            fresh = fresh[max(0, len(fresh) - (self._count - told)) :]
            told = self._count
            for answer in fresh:
                yield answer
                if isinstance(answer, Outcome):
                    return
            await news.wait()


class Commands:
    """Runs commands; each at most once under its key."""

    def __init__(self, scene: Scene, audit: AuditLog, agent_started_ns: int) -> None:
        """Act on `scene`, and record in `audit`."""
        self._scene, self._audit, self._agent_started_ns = scene, audit, agent_started_ns
        self._by_key: OrderedDict[tuple[Who, str], Run] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = Refusals(self._summarize)

    async def answers(self, command: Command, who: Who) -> AsyncIterator[Answer]:
        """Run a command, or join the one that runs or ran under its key; yield its answers."""
        if who.socket != "operate":
            yield self._turned_away(command, who)
            return
        memory = (replace(who, ssh_address=""), command.key)  # a retry may come from another port
        remembered = 0 < len(command.key) <= MAX_NAME and not command.dry_run
        known = self._by_key.get(memory) if remembered else None
        run = known or self._start(command, who)
        if remembered and known is None:
            self._by_key[memory] = run
            self._forget_keys()
        if known is not None and not _same(known.command, command):
            taken = Misnamed(f"the key {command.key!r} was another command's: take a new one")
            yield self._recorded(_unfit(command, taken), command, who)
            return
        async for answer in run.follow():
            told = msgspec.structs.replace(answer, id=command.id)
            if isinstance(told, Outcome) and known is not None:
                told = msgspec.structs.replace(told, repeated=True)
                self._record("repeated", command, who, told)
            yield told

    def _start(self, command: Command, who: Who) -> Run:
        run = Run(command)
        task = asyncio.create_task(self._conduct(run, who, crowded=len(self._tasks) >= RUNS_AT_ONCE))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    def _forget_keys(self) -> None:
        while len(self._by_key) > KEYS_KEPT:
            oldest = next((key for key, run in self._by_key.items() if run.outcome is not None), None)
            if oldest is None:
                return
            del self._by_key[oldest]

    async def close(self) -> None:
        """End what still waits: its orders stay in force."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._refusals.close()

    def _turned_away(self, command: Command, who: Who) -> Outcome:
        """Refuse a client that may only look: it takes no place, no key, and little of the record."""
        why = Forbidden("the view socket only looks: connect to operate.sock to act")
        outcome = _unfit(command, why)
        if not self._refusals.recorded(who):
            problem = "too many refusals of this client in one minute: they are recorded by their number"
            return msgspec.structs.replace(outcome, audited=False, audit_problem=problem)
        short = msgspec.structs.replace(
            command,
            verb=command.verb[:SHORT],
            targets=[target[:SHORT] for target in command.targets[:1]],
            arguments={},
            source=command.source[:SHORT],
            key=command.key[:SHORT],
        )
        problem = self._record("ended", short, who, outcome)
        return msgspec.structs.replace(outcome, audited=not problem, audit_problem=problem)

    def _summarize(self, who: Who, count: int) -> None:
        """Record how many refusals were not recorded one by one."""
        record = {
            **_of_whom("refused-more", who),
            "message": f"{plural(count, 'more command was', 'more commands were')} refused within a minute",
            "count": count,
        }
        if problem := self._audit.write(record):
            logger.warning("%d refusals were not recorded: %s", count, problem)

    async def _conduct(self, run: Run, who: Who, *, crowded: bool) -> None:
        """Check, plan, do and record one command."""
        command = run.command
        try:
            if crowded:
                raise Forbidden(f"{RUNS_AT_ONCE} commands are under way already: wait for some to end")
            outcome = await self._carry_out(run, who)
        except Unfit as unfit:
            outcome = _unfit(command, unfit)
        except asyncio.CancelledError:
            ended = "the agent ended before this did; what was ordered stays in force"
            run.say(self._recorded(_outcome(command, "failed", FAILED, ended), command, who))
            raise
        except Exception:
            logger.exception("a bug in kvtop ended the command %r; please report it", command)
            bug = "a bug in kvtop ended this command; the agent's log has the details"
            outcome = _outcome(command, "failed", FAILED, bug)
        run.say(self._recorded(outcome, command, who))

    async def _carry_out(self, run: Run, who: Who) -> Outcome:
        command = run.command
        errand = self._understand(command)
        run.say(msgspec.structs.replace(errand.plan(), agent_started_ns=self._agent_started_ns))
        if command.dry_run:
            return _outcome(command, "planned", DONE, "a dry run: nothing was done")
        self._record("started", command, who, None)
        return await errand.carry_out(run.say)

    def _understand(self, command: Command) -> Errand:
        verb = VERBS.get(command.verb)
        if verb is None:
            raise Misnamed(f"there is no command {command.verb[:MAX_NAME]!r}; there are: {', '.join(VERBS)}")
        if command.agent_started_ns not in (None, self._agent_started_ns):
            raise Forbidden("the agent was started anew since this was planned: look again")
        checked(command, verb)
        self._scene.instances.refresh(time.monotonic_ns())
        return verb(self._scene, command)

    def _recorded(self, outcome: Outcome, command: Command, who: Who) -> Outcome:
        """Record an outcome, and return it with what became of the record."""
        problem = self._record("ended", command, who, outcome)
        return msgspec.structs.replace(outcome, audited=not problem, audit_problem=problem)

    def _record(
        self,
        event: Literal["started", "ended", "repeated"],
        command: Command,
        who: Who,
        outcome: Outcome | None,
    ) -> str:
        record = {
            **_of_whom(event, who),
            "source": command.source[:MAX_NAME],
            "verb": command.verb[:MAX_NAME],
            "targets": [target[:MAX_NAME] for target in command.targets[:MAX_TARGETS]],
            "arguments": {
                name[:MAX_NAME]: value[:MAX_NAME] for name, value in islice(command.arguments.items(), 16)
            },
            "dry_run": command.dry_run,
            "wait": command.wait,
            "force": command.force,
            "key": command.key[:MAX_NAME] or None,
        }
        if outcome is not None:
            record |= {
                "state": outcome.state,
                "exit_code": outcome.exit_code,
                "message": outcome.message,
                "facts": outcome.facts,
                "outcomes": outcome.targets,
            }
        problem = self._audit.write(record)
        if problem:
            logger.warning("the command %s was not recorded: %s", command.verb, problem)
        return problem


def _of_whom(event: str, who: Who) -> dict[str, Any]:
    """Return how each record begins: when, what kind, and who."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": event,
        "uid": who.uid,
        "ssh_key": who.ssh_key or None,
        "ssh_from": who.ssh_address or None,
        "socket": who.socket,
    }


def _same(one: Command, other: Command) -> bool:
    """Whether two commands ask for the same, from wherever, whatever the client has seen meanwhile."""
    same: dict[str, Any] = {"id": 0, "source": "", "serving_elsewhere": 0, "agent_started_ns": None}
    return msgspec.structs.replace(one, **same) == msgspec.structs.replace(other, **same)


def _unfit(command: Command, unfit: Unfit) -> Outcome:
    return _outcome(command, unfit.state, unfit.exit_code, str(unfit))


def _outcome(command: Command, state: OutcomeState, exit_code: int, message: str) -> Outcome:
    return Outcome(id=command.id, verb=command.verb, exit_code=exit_code, state=state, message=message)
