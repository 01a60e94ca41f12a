"""The way into the command line, and the way out: what an exception means for the operator.

Exit codes: 0 done, 1 operation failed, 2 usage, 3 cannot connect, 4 timed out, 5 unhealthy (`--check`),
70 a bug in kvtop, 130 interrupted. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from kvtop import __version__
from kvtop.console.fleet.errors import KvtopError, one_line

BUG_EXIT_CODE = 70
INTERRUPTED_EXIT_CODE = 130
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What tells a console to leave: Ctrl+C, a polite kill, a closed terminal."""
_DEBUG = "--debug"


def main() -> None:
    """Run this process's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    from kvtop.console.commands import kvtop  # noqa: PLC0415 - so that a bug in there is reported like others

    try:
        result = kvtop.main(list(arguments), prog_name="kvtop", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        notice("interrupted")
        return INTERRUPTED_EXIT_CODE
    except KvtopError as error:
        notice(str(error))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _bug(error, debug=_DEBUG in arguments)


def notice(text: str) -> None:
    """Tell the operator something that is not data."""
    sys.stderr.write(f"kvtop: {text}\n")


def _bug(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""  # noqa: PTH119
    what = one_line(f"{type(error).__name__}: {error}")
    again = "" if debug else "; run it again with --debug for the traceback"
    notice(f"a bug in kvtop {__version__}: {what}{place}{again}, and report it with that")
    return BUG_EXIT_CODE
