"""The acting verbs on a command line, the same for `kvtop-agent` on a node and `kvtop` on the jump host.

Only how the agent is reached differs. Data goes to stdout (the outcome), everything else to stderr.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
import msgspec

from kvtop.agents.act import (
    DEFAULT_TIMEOUT_S,
    DONE,
    INTERRUPTED,
    MAX_TIMEOUT_S,
    Answer,
    Command,
    Outcome,
    Plan,
    Progress,
)
from kvtop.agents.model import SCHEMA_VERSION
from kvtop.agents.text import printable

Act = Callable[[Command], AsyncIterator[Answer]]
"""Has an agent run a command: `AgentConnection.act`, or the same through a console's conversation."""

_T = TypeVar("_T")
_UNITS_S: Final = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """Return the seconds that a time span means, as people write it.

    >>> [duration_s(each) for each in ("60s", "2m", "1.5", "500ms")]
    [60.0, 120.0, 1.5, 0.5]

    Raises:
        click.BadParameter: it is none, or longer than a day.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip(), re.ASCII)
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise click.BadParameter(f"{text!r} is no time span from 1ms to 24h, such as 60s, 2m or 90")
    return seconds


@dataclass(frozen=True)
class Asked:
    """One command line, understood."""

    command: Command
    yes: bool
    json: bool


def verb_commands(
    act: Callable[..., _T], options: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[click.Command]:
    """Return the commands; each calls `act` with an `Asked` and what `options` adds to the command line."""

    def call(
        verb: str, targets: tuple[str, ...], arguments: dict[str, str | None], given: dict[str, Any]
    ) -> _T:
        command = Command(
            verb=verb,
            targets=list(targets),
            arguments={name: value for name, value in arguments.items() if value is not None},
            dry_run=given.pop("dry_run"),
            wait=given.pop("wait", False),
            timeout_s=given.pop("wait_timeout_s", DEFAULT_TIMEOUT_S),
            force=given.pop("force", False),
            key=given.pop("key"),
            source=_source(),
        )
        return act(Asked(command, given.pop("yes"), given.pop("json_wanted")), **given)

    instance = click.argument("target", metavar="INSTANCE")

    @click.command()
    @instance
    @click.argument("mode", type=click.Choice(["push", "pull"]))
    @click.option("--peer", metavar="PEER", help="Only with this peer; without it all, exceptions included.")
    @_waiting("until transfers prove it: none of the old direction left, one of the new completed")
    @options
    @_common
    def mode(target: str, mode: str, peer: str | None, **given: Any) -> _T:
        """Set the direction that an instance's new requests take.

        INSTANCE and PEER are names, or engine ids. Transfers under way finish as they began.
        """
        return call("mode", (target,), {"mode": mode, "peer": peer}, given)

    @click.command()
    @click.argument("targets", nargs=-1, required=True, metavar="INSTANCE...")
    @_waiting("until no transfer keeps them, telling what still does")
    @click.option("--force", is_flag=True, help="Also the last serving instance of a role.")
    @options
    @_common
    def drain(targets: tuple[str, ...], **given: Any) -> _T:
        """Have instances start no new KV transfer.

        Requests that still arrive are served without one. Reversed by undrain. As a container's preStop hook:
        `kvtop-agent drain NAME --wait --timeout 60s --force`.
        """
        return call("drain", targets, {}, given)

    @click.command()
    @click.argument("targets", nargs=-1, required=True, metavar="INSTANCE...")
    @options
    @_common
    def undrain(targets: tuple[str, ...], **given: Any) -> _T:
        """Have drained or draining instances start KV transfers again."""
        return call("undrain", targets, {}, given)

    @click.command()
    @click.argument("targets", nargs=-1, required=True, metavar="TRANSFER...")
    @options
    @_common
    def cancel(targets: tuple[str, ...], **given: Any) -> _T:
        """End transfers, named by their ids in `transfers`.

        D's request computes the KV again, or fails, as vLLM's kv_load_failure_policy says. What is on the
        wire cannot be stopped: its blocks stay in quarantine until it has ended.
        """
        return call("cancel", targets, {}, given)

    @click.command()
    @instance
    @click.argument("peer")
    @options
    @_common
    def evict(target: str, peer: str, **given: Any) -> _T:
        """Have INSTANCE forget the NIXL state of PEER: the next request between them shakes hands afresh."""
        return call("evict", (target,), {"peer": peer}, given)

    return [mode, drain, undrain, cancel, evict]


def _waiting(until: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        timeout = click.option(
            "--timeout",
            "wait_timeout_s",
            type=duration_s,
            default=f"{DEFAULT_TIMEOUT_S:g}s",
            metavar="DURATION",
            help="How long to wait: 60s, 2m, or seconds (default 60s). Then exit code 4.",
        )
        return click.option("--wait", is_flag=True, help=f"Wait {until}.")(timeout(command))

    return add


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--key", default="", metavar="KEY", help="Run it at most once under this key."),
        click.option(
            "--json", "json_wanted", is_flag=True, help="Print the outcome as JSON (schema_version 1)."
        ),
        click.option("-y", "--yes", is_flag=True, help="Do not ask (it is asked on a terminal only)."),
        click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    ):
        command = option(command)
    return command


def _source() -> str:
    """Return what the audit is told of where this runs."""
    with suppress(OSError, KeyError):
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        ssh = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
        program = os.path.basename(sys.argv[0]) or "kvtop"  # noqa: PTH119
        return f"{program} {who} pid {os.getpid()}" + (f" through SSH from {ssh}" if ssh else "")
    return ""


class Talk:
    """One command's conversation with the operator."""

    def __init__(
        self,
        asked: Asked,
        program: str,
        *,
        host: str = "",
        out: Callable[[str], None] = click.echo,
        err: Callable[[str], None] = lambda text: click.echo(text, err=True),
    ) -> None:
        """Speak as `program`, about the agent on `host`; `out` and `err` take a line each."""
        self._out, self._err = out, err
        self._asked, self._program, self._host = asked, program, host
        self._plan: Plan | None = None
        self._ordered = False

    async def hold(self, act: Act) -> int:
        """Run the command; ask first where somebody can answer. Returns the exit code.

        Raises:
            What `act` raises: the conversation with the agent ended before the outcome.
        """
        command = self._asked.command
        try:
            if self._asks():
                planned = await self._run(act, msgspec.structs.replace(command, dry_run=True, key=""))
                if planned.state != "planned" or self._plan is None:
                    return self._end(planned)
                if not self._confirms():
                    self._say("nothing was done")
                    return INTERRUPTED
                command = msgspec.structs.replace(
                    command, targets=self._plan.target_ids, agent_started_ns=self._plan.agent_started_ns
                )
            self._ordered = not command.dry_run
            return self._end(await self._run(act, command))
        except (asyncio.CancelledError, click.Abort):
            return self._end(self._interrupted())
        except Exception:
            if self._ordered:
                self._say("the agent went before the outcome: what was ordered may be in force")
            raise

    def _asks(self) -> bool:
        asked = self._asked
        return not (asked.yes or asked.command.dry_run) and sys.stdin.isatty() and sys.stderr.isatty()

    def _confirms(self) -> bool:
        """Ask; Ctrl+C must end the question, which asyncio's own handler would leave standing."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return click.confirm(f"{self._program}: go ahead?", default=False, err=True)
        finally:
            signal.signal(signal.SIGINT, before)

    async def _run(self, act: Act, command: Command) -> Outcome:
        async for answer in act(command):
            match answer:
                case Plan():
                    self._show_plan(answer)
                case Progress():
                    self._show_progress(answer)
                case Outcome():
                    return answer
        raise ConnectionResetError("the agent ended the conversation without an outcome")

    def _show_plan(self, plan: Plan) -> None:
        if self._plan is not None:
            return  # it was shown when it was asked for
        self._plan = plan
        simulated = " (simulated)" if plan.simulated else ""
        where = f" on {self._host}" if self._host else ""
        self._say(f"{plan.verb} {', '.join(plan.targets)}{simulated}{where}")
        for line in plan.steps:
            self._write(f"  {line}")
        for line in plan.irreversible:
            self._write(f"  cannot be undone: {line}")
        self._write(f"  requests that this touches: {plan.requests}")

    def _show_progress(self, progress: Progress) -> None:
        first, *more = progress.lines or [""]
        self._write(f"  {progress.elapsed_s:5.1f} s  {first}")
        for line in more:
            self._write(f"           {line}")

    def _interrupted(self) -> Outcome:
        verb = self._asked.command.verb
        targets = " ".join(self._plan.targets if self._plan else self._asked.command.targets)
        undo = f"; `undrain {targets}` takes it back" if verb == "drain" else ""
        message = f"what was ordered stays in force{undo}" if self._ordered else "nothing was ordered"
        return Outcome(
            verb=verb, exit_code=INTERRUPTED, state="interrupted", message=message, audited=self._ordered
        )

    def _end(self, outcome: Outcome) -> int:
        if not outcome.audited and outcome.audit_problem:
            self._say(f"not recorded: {outcome.audit_problem}")
        if self._asked.json:
            value = {"schema_version": SCHEMA_VERSION, "host": self._host or None, "plan": self._plan}
            document = value | msgspec.structs.asdict(outcome)
            self._out(msgspec.json.encode(document).decode())
        elif outcome.exit_code == DONE:
            again = " (the outcome of an earlier command under this key)" if outcome.repeated else ""
            self._out(printable(outcome.message) + again)
        else:
            self._say(f"{outcome.state}: {outcome.message}")
        return outcome.exit_code

    def _say(self, text: str) -> None:
        self._write(f"{self._program}: {text}")

    def _write(self, text: str) -> None:
        self._err(printable(text))
