"""What an operator asks an agent to do, and what it answers: messages on `operate.sock`.

A `Command` is answered with one `Plan`, then `Progress` as things change, then one `Outcome`; `--json` prints
the same structs. What can be asked is the registry in `kvtop.agents.commands`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_CONNECTION: Final = 3
TIMED_OUT: Final = 4
INTERRUPTED: Final = 130

MAX_TARGETS: Final = 256
MAX_NAME: Final = 512
"""Most targets of a command, and most characters of anything that it names."""
MAX_TIMEOUT_S: Final = 86_400.0
DEFAULT_TIMEOUT_S: Final = 60.0

Facts = dict[str, Any]
"""Values that JSON can hold, by name; units are in the name."""

OutcomeState = Literal["done", "planned", "refused", "failed", "timed-out", "usage", "interrupted"]
"""done: it holds. planned: a dry run. refused: nothing was done, since a rule forbids it. failed: it was
tried and does not hold. timed-out: ordered, but not proved within the time given. usage: it cannot be
understood. interrupted: the client left; what was ordered stays in force."""


class Command(msgspec.Struct, tag="command", frozen=True, kw_only=True):
    """Asks for one action. What it acts on is fixed by the client, never chosen by the agent."""

    id: int = 0
    """Repeated in each answer, so that a client may have several commands under way."""
    verb: str
    targets: list[str] = []
    """Instance names or engine ids; for `cancel` ids of the ledger's rows."""
    arguments: dict[str, str] = {}
    """The verb's own arguments by name, such as `mode` and `peer`."""
    dry_run: bool = False
    """Only plan."""
    wait: bool = False
    """Answer once it holds, at the latest after `timeout_s`; the order stays in force whatever comes."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)] = DEFAULT_TIMEOUT_S
    force: bool = False
    """Do it although it takes the last serving instance of a role."""
    serving_elsewhere: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many serving instances of the target's role the client sees on other nodes."""
    key: str = ""
    """A command that comes again under its key is not run again: it is answered with the first outcome."""
    agent_started_ns: int | None = None
    """`Node.agent_started_ns` of the agent whose rows `targets` names: another agent has other rows."""
    source: str = ""
    """For the audit: what the client says of where it runs."""


class Plan(msgspec.Struct, tag="plan", frozen=True, kw_only=True):
    """What a command will do, before it does it."""

    id: int = 0
    verb: str
    targets: list[str]
    """Names for people."""
    target_ids: list[str]
    """Engine ids, or ids of the ledger's rows: what to name so that the same is acted on later."""
    agent_started_ns: int = 0
    """Of the agent that planned it; see `Command.agent_started_ns`."""
    steps: list[str]
    """What will happen, a line each."""
    irreversible: list[str] = []
    """What of it cannot be undone."""
    requests: int = 0
    """Live transfers, and so requests, that it touches."""
    simulated: bool = False


class Progress(msgspec.Struct, tag="progress", frozen=True, kw_only=True):
    """How far a command that waits has come."""

    id: int = 0
    elapsed_s: float
    lines: list[str]
    blockers: dict[str, int] = {}
    """What is still in the way, by kind."""
    transfers: list[int] = []
    """The ledger's rows that are still in the way."""


class TargetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one target."""

    target: str
    """Its id: an engine id, or the id of a transfer."""
    name: str
    ok: bool
    message: str
    before: Facts = {}
    after: Facts = {}


class Outcome(msgspec.Struct, tag="outcome", frozen=True, kw_only=True):
    """How a command ended."""

    id: int = 0
    verb: str
    exit_code: int
    state: OutcomeState
    message: str
    facts: Facts = {}
    targets: list[TargetOutcome] = []
    audited: bool = True
    """Whether a record of it was written."""
    audit_problem: str = ""
    repeated: bool = False
    """Whether this is the outcome of an earlier command under the same key."""


Answer = Plan | Progress | Outcome
