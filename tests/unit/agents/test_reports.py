"""What `kvtop-agent` prints shows names and errors as they are, and lets none of them act on the terminal."""

from __future__ import annotations

import pytest

from kvtop.agents.model import Snapshot, Transfer
from kvtop.agents.reports import as_table
from kvtop.agents.server import Agent


@pytest.mark.parametrize("error", ["NIXL [backend] refused", "closed by [/peer]", "of pod :warning:"])
def test_an_error_is_printed_as_it_is(error: str) -> None:
    assert error in printed(error)


@pytest.mark.parametrize("error", ["\x1b[2Jgone", "a\rb", "a\nb", "\x9b2J", "\x07"])
def test_no_control_character_reaches_the_terminal(error: str) -> None:
    assert [c for c in printed(error) if not c.isprintable() and c != "\n"] == []
    assert len(printed(error).splitlines()) == 2


def printed(error: str) -> str:
    row = Transfer(id=1, stage="failed", stage_since_ns=1, first_seen_ns=1, error=error)
    return as_table("transfers", Snapshot(node=Agent().node(), transfers=[row]))
