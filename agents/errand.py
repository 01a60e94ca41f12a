"""What all verbs share: an errand is one command, understood and checked, to be planned and carried out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from kvtop.agents.act import (
    DONE,
    FAILED,
    MAX_NAME,
    MAX_TARGETS,
    TIMED_OUT,
    Command,
    Facts,
    Outcome,
    OutcomeState,
    Plan,
    Progress,
    TargetOutcome,
)
from kvtop.agents.dispatch import Answered
from kvtop.agents.instances import InstanceRecord
from kvtop.agents.model import Transfer
from kvtop.agents.scene import SETTLE_S, Misnamed, Scene, looking
from kvtop.agents.text import noun

Tell = Callable[[Progress], None]
ROWS_TOLD: Final = 20
SIGN_OF_LIFE_S: Final = 5.0
"""Longest silence of a command that waits."""
_EXIT_CODES: Final[Mapping[OutcomeState, int]] = {"done": DONE, "failed": FAILED, "timed-out": TIMED_OUT}


@dataclass(frozen=True)
class Argument:
    """One of a verb's own arguments."""

    choices: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True)
class Result:
    """What became of one target."""

    state: OutcomeState
    target: TargetOutcome


class Errand(ABC):
    """One command. Making it finds its targets and checks what is asked."""

    summary: ClassVar[str]
    """One line for the help."""
    arguments: ClassVar[Mapping[str, Argument]] = {}
    several: ClassVar[bool] = False
    """Whether it takes more than one target."""

    def __init__(self, scene: Scene, command: Command) -> None:
        """Understand `command`, without doing anything.

        Raises:
            Unfit: it is not to be carried out.
        """
        self.scene, self.command = scene, command
        self._began_s = time.monotonic()
        self._told: tuple[object, float] = (None, 0.0)

    @abstractmethod
    def plan(self) -> Plan:
        """Return what will be done."""

    @abstractmethod
    async def carry_out(self, tell: Tell) -> Outcome:
        """Do it, telling how far it has come, and return how it ended."""

    @property
    def time_left_s(self) -> float:
        """How much of the command's time is left."""
        return max(0.0, self.command.timeout_s - (time.monotonic() - self._began_s))

    def progress(
        self,
        tell: Tell,
        lines: Sequence[str],
        blockers: dict[str, int] | None = None,
        rows: Sequence[Transfer] = (),
    ) -> None:
        """Tell how far it has come, where that has changed or nothing was told for long."""
        now_s = time.monotonic()
        what = (tuple(lines), tuple((blockers or {}).items()), tuple((row.id, row.stage) for row in rows))
        if what == self._told[0] and now_s - self._told[1] < SIGN_OF_LIFE_S:
            return
        self._told = (what, now_s)
        more = [f"and {left} more {noun(left, 'transfer')}"] if (left := len(rows) - ROWS_TOLD) > 0 else []
        tell(
            Progress(
                id=self.command.id,
                elapsed_s=now_s - self._began_s,
                lines=[*lines, *map(self.scene.row_line, rows[:ROWS_TOLD]), *more],
                blockers=blockers or {},
                transfers=[row.id for row in rows],
            )
        )

    async def shows(self, condition: Callable[[], bool]) -> bool:
        """Return whether what an engine answered shows in its reports, soon."""
        async for _ in looking(SETTLE_S):
            if condition():
                return True
        return False

    def unanswered(self, record: InstanceRecord, answered: Answered, before: Facts) -> Result:
        """Return the result of an order that was not obeyed."""
        state: OutcomeState = "timed-out" if answered.timed_out else "failed"
        return self.result(record, state, answered.message, before)

    def result(self, record: InstanceRecord, state: OutcomeState, message: str, before: Facts) -> Result:
        """Return what became of an instance."""
        hello = record.newest
        return Result(
            state,
            TargetOutcome(
                target=hello.engine_id,
                name=hello.name,
                ok=state == "done",
                message=message,
                before=before,
                after=self.scene.holds(record),
            ),
        )

    def outcome(self, results: Sequence[Result], facts: Facts | None = None) -> Outcome:
        """Return the outcome of all targets: that of the worst."""
        states = [each.state for each in results]
        worst: OutcomeState = next((bad for bad in ("failed", "timed-out") if bad in states), "done")
        return Outcome(
            id=self.command.id,
            verb=self.command.verb,
            exit_code=_EXIT_CODES[worst],
            state=worst,
            message="; ".join(f"{each.target.name}: {each.target.message}" for each in results),
            facts=facts or {},
            targets=[each.target for each in results],
        )


def checked(command: Command, of: type[Errand]) -> None:
    """Check a command's targets and arguments against what a verb takes.

    Raises:
        Misnamed: something is missing, or too much.
    """
    verb = command.verb
    names = (*command.targets, *command.arguments, *command.arguments.values(), command.key)
    if any(len(name) > MAX_NAME for name in names):
        raise Misnamed(f"a name has at most {MAX_NAME} characters")
    if len(command.targets) > MAX_TARGETS:
        raise Misnamed(f"{len(command.targets)} targets are too many: at most {MAX_TARGETS} at once")
    if not command.targets or (len(command.targets) > 1 and not of.several):
        many = "at least one target" if of.several else "exactly one target"
        raise Misnamed(f"{verb} takes {many}, not {len(command.targets)}")
    if unknown := sorted(command.arguments.keys() - of.arguments.keys()):
        known = ", ".join(of.arguments) or "none"
        raise Misnamed(f"{verb} has no argument {unknown[0]!r}; it has: {known}")
    for name, argument in of.arguments.items():
        value = command.arguments.get(name)
        if value is None and argument.required:
            raise Misnamed(f"{verb} needs the argument {name!r}")
        if value is not None and argument.choices and value not in argument.choices:
            raise Misnamed(f"{name} is {' or '.join(argument.choices)}, not {value!r}")
