"""The `kvtop-agent` command: runs an agent, or asks the one that runs here."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvtop import __version__
from kvtop.agents.act_cli import Asked, Talk, verb_commands
from kvtop.agents.client import connect_unix
from kvtop.agents.ledger import FINISHED_KEPT
from kvtop.agents.model import Snapshot
from kvtop.agents.runtime import RuntimeFolderError, RuntimePaths
from kvtop.agents.wire import WireError

EXIT_FAILED: Final = 1
EXIT_NO_CONNECTION: Final = 3
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130
_T = TypeVar("_T")
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


class _Failure(click.ClickException):
    """An error for people: one line, and the exit code that scripts look at."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = exit_code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="kvtop-agent %(version)s")
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path),
    help="The folder of the agent's sockets (default: KVTOP_RUNTIME_DIR, else this user's own).",
)
@click.pass_context
def cli(context: click.Context, runtime_dir: Path | None) -> None:
    """Collect what the vLLM instances of this node report, tell consoles, and act on them."""
    try:
        context.obj = RuntimePaths.at(runtime_dir) if runtime_dir else RuntimePaths.default()
    except RuntimeFolderError as error:
        raise _Failure(str(error), EXIT_FAILED) from error


@cli.command()
@click.option(
    "--finished",
    default=FINISHED_KEPT,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="How many finished transfers to keep.",
)
@click.option(
    "--exit-when-idle",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="End when no engine and no console has been attached for so long.",
)
@click.option(
    "--ssh-listen",
    metavar="[HOST:]PORT",
    help="Serve consoles over an SSH server of the agent's own (host 127.0.0.1 unless named; port 0 takes a "
    "free one). Off by default.",
)
@click.option(
    "--ssh-authorized-keys",
    type=click.Path(path_type=Path),
    help="The public keys that may connect.",
)
@click.option(
    "--ssh-host-key",
    type=click.Path(path_type=Path),
    help="The SSH server's private key; made if missing (default: in the runtime folder).",
)
@click.option(
    "--engine-logs/--no-engine-logs",
    default=True,
    show_default=True,
    help="Keep the last lines that an engine which died had logged.",
)
@click.option(
    "--observe",
    multiple=True,
    metavar="URL[,role=prefill|decode][,name=NAME]",
    help="Also show a stock vLLM or SGLang server, read from its /metrics; may be given several times.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
)
@click.pass_obj
def run(
    paths: RuntimePaths,
    finished: int,
    exit_when_idle: float | None,
    ssh_listen: str | None,
    ssh_authorized_keys: Path | None,
    ssh_host_key: Path | None,
    engine_logs: bool,
    observe: tuple[str, ...],
    log_level: str,
) -> None:
    """Run an agent in the foreground until it is told to end."""
    from kvtop.agents.audit import AuditLog  # noqa: PLC0415 - only this command needs it
    from kvtop.agents.own_log import keep_small  # noqa: PLC0415
    from kvtop.agents.process import SshOptions, serve, sole_agent  # noqa: PLC0415
    from kvtop.agents.server import Agent  # noqa: PLC0415
    from kvtop.agents.stock.observer import Observers, Target  # noqa: PLC0415

    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    ssh: SshOptions | None = None
    if ssh_listen is not None:
        host, port = _address(ssh_listen)
        if ssh_authorized_keys is None:
            raise click.UsageError("--ssh-listen needs --ssh-authorized-keys: only public keys may connect")
        ssh = SshOptions(host, port, ssh_authorized_keys, ssh_host_key or paths.folder / "ssh_host_key")
    try:
        observers = Observers([Target.parse(each) for each in observe]) if observe else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--observe") from error
    try:
        paths.prepare()
        with sole_agent(paths) as holder:
            if holder is not None:
                click.echo(f"an agent serves {paths.folder} already (pid {holder})", err=True)
                return
            keep_small(paths.log)
            agent = Agent(finished_kept=finished, audit=AuditLog(paths.audit), engine_logs=engine_logs)
            asyncio.run(serve(agent, paths, ssh, exit_when_idle, observers))
    except (RuntimeFolderError, OSError, ValueError) as error:
        raise _Failure(str(error), EXIT_FAILED) from error


def _address(text: str) -> tuple[str, int]:
    """Split `[HOST:]PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise click.BadParameter(f"{text!r} is no [HOST:]PORT", param_hint="--ssh-listen")
    return host.strip("[]") or "127.0.0.1", int(port)


_json = click.option("--json", "json_wanted", is_flag=True, help="Print JSON for scripts.")


@cli.command()
@_json
@click.pass_obj
def status(paths: RuntimePaths, json_wanted: bool) -> None:
    """Print this node's instances once."""
    from kvtop.agents.reports import as_json, as_table  # noqa: PLC0415 - rich only where it prints

    snapshot = _snapshot(paths)
    click.echo(as_json("status", snapshot) if json_wanted else as_table("status", snapshot))


@cli.command()
@_json
@click.pass_obj
def transfers(paths: RuntimePaths, json_wanted: bool) -> None:
    """Print this node's KV transfers once: those under way, and the latest that ended."""
    from kvtop.agents.reports import as_json, as_table  # noqa: PLC0415

    snapshot = _snapshot(paths)
    click.echo(as_json("transfers", snapshot) if json_wanted else as_table("transfers", snapshot))


@cli.command()
@click.option("--view", is_flag=True, help="Use the read-only socket.")
@click.pass_obj
def stdio(paths: RuntimePaths, view: bool) -> None:
    """Connect standard input and output with the agent: what a console runs through SSH."""
    from kvtop.agents.stdio import bridge  # noqa: PLC0415

    try:
        asyncio.run(bridge(paths.view if view else paths.operate))
    except OSError as error:
        raise _no_agent(paths, error) from error


def _act(asked: Asked) -> int:
    """Have this node's agent run a command."""
    paths = click.get_current_context().find_object(RuntimePaths)
    assert paths is not None

    async def act() -> int:
        connection = await connect_unix(paths.operate)
        async with connection:
            return await Talk(asked, "kvtop-agent").hold(connection.act)

    return _conversing(paths, act())


for _command in verb_commands(_act, lambda command: command):
    cli.add_command(_command)


def _snapshot(paths: RuntimePaths) -> Snapshot:
    async def ask() -> Snapshot:
        connection = await connect_unix(paths.view)
        async with connection:
            return await connection.snapshot()

    return _conversing(paths, ask())


def _conversing(paths: RuntimePaths, conversation: Coroutine[Any, Any, _T]) -> _T:
    """Run a conversation with the agent; say for people why there is none."""
    try:
        return asyncio.run(conversation)
    except TimeoutError as error:
        raise _Failure(
            f"the agent in {paths.folder} does not answer: is it stopped?", EXIT_NO_CONNECTION
        ) from error
    except ConnectionResetError as error:
        raise _Failure(
            f"the agent in {paths.folder} ended the conversation: {error}", EXIT_NO_CONNECTION
        ) from error
    except OSError as error:
        raise _no_agent(paths, error) from error
    except WireError as error:
        raise _Failure(str(error), EXIT_NO_CONNECTION) from error


def _no_agent(paths: RuntimePaths, error: OSError) -> _Failure:
    if isinstance(error, PermissionError):
        return _Failure(f"this user may not talk to the agent in {paths.folder}", EXIT_NO_CONNECTION)
    return _Failure(
        f"no agent runs in {paths.folder}: start an engine with kvtop's connector, or `kvtop-agent run`",
        EXIT_NO_CONNECTION,
    )


def main() -> None:
    """Run the command with this process's arguments, and end with the exit code that scripts look at."""
    try:
        code = cli(prog_name="kvtop-agent", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # e.g. `kvtop-agent transfers | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:
        traceback.print_exc()
        click.echo("this is a bug in kvtop; please report it with the lines above", err=True)
        code = EXIT_BUG
    sys.exit(code)


if __name__ == "__main__":
    main()
