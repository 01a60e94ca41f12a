"""The acting verbs behind the agent's own SSH server: `ssh -p 2222 node kvtop-agent drain prefill-0 --wait`.

The same commands as `kvtop-agent`'s, in the agent's process, so that the record names the key that came in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvtop.agents.act_cli import Asked, Talk, verb_commands
from kvtop.agents.client import AgentConnection
from kvtop.agents.who import connect_for

PROGRAM: Final = "kvtop-agent"


def _as_asked(asked: Asked, **_options: Any) -> Asked:
    return asked


_COMMANDS: Final = {str(each.name): each for each in verb_commands(_as_asked, lambda command: command)}
for _command in _COMMANDS.values():
    _command.add_help_option = False  # it would be printed where the agent's own output goes
VERBS: Final = tuple(_COMMANDS)


async def act_for_key(
    operate: Path,
    words: Sequence[str],
    ssh_key: str,
    ssh_address: str,
    out: Callable[[str], None],
    err: Callable[[str], None],
) -> int:
    """Run one verb with its arguments for whoever came in with a key; return the exit code.

    Raises:
        OSError: the agent ended the conversation.
    """
    verb, *arguments = words
    command = _COMMANDS[verb]
    try:
        with command.make_context(f"{PROGRAM} {verb}", arguments) as context:
            asked: Asked = command.invoke(context)
    except click.ClickException as error:
        err(f"Error: {error.format_message()}")
        return error.exit_code
    source = f"{PROGRAM} through its SSH server"
    fixed = msgspec.structs.replace(asked.command, source=source)
    connection = AgentConnection(*await connect_for(operate, ssh_key, ssh_address))
    async with connection:
        talk = Talk(Asked(fixed, yes=True, json=asked.json), PROGRAM, out=out, err=err)
        return await talk.hold(connection.act)
