"""The log of an agent that an engine started stays small, and all that the agent says goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.agents.own_log import MAX_BYTES
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import agent_pid, reporting, runtime_folder
from tests.support.waiting import wait_until

TALKATIVE = """
import logging, os, sys
from pathlib import Path
from kvtop.agents.own_log import keep_small
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
print(keep_small(Path(sys.argv[1]), max_bytes=2000, files_kept=2), flush=True)
for number in range(1000):
    logging.warning("line %d", number)
os.write(2, b"its last words")
"""


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


def test_an_agent_that_an_engine_started_rotates_its_log(paths: RuntimePaths) -> None:
    paths.prepare()
    paths.log.write_bytes(b"x" * (MAX_BYTES - 1) + b"\n")

    with reporting(paths):
        wait_until(lambda: b"serving" in paths.log.read_bytes(), "the agent to log")
        streams = [Path(f"/proc/{agent_pid(paths)}/fd/{number}").readlink() for number in (1, 2)]

    assert paths.log.stat().st_size < MAX_BYTES
    assert paths.log.with_name("agent.log.1").stat().st_size == MAX_BYTES
    assert streams == [paths.log, paths.log]


def test_a_few_older_files_are_kept_and_what_is_not_logged_goes_to_the_newest(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with log.open("ab") as stream:
        subprocess.run([sys.executable, "-c", TALKATIVE, str(log)], stdout=stream, stderr=stream, check=True)

    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["agent.log", "agent.log.1", "agent.log.2"]
    assert all(each.stat().st_size <= 2000 + len("its last words") for each in files)
    assert log.read_text().endswith("WARNING line 999\nits last words")
    assert "WARNING line 0\n" not in "".join(each.read_text() for each in files)


def test_a_log_that_goes_elsewhere_is_let_be(tmp_path: Path) -> None:
    """Such as to a terminal or to the journal, also where an old file lies in the folder."""
    log = tmp_path / "agent.log"
    log.write_text("old\n")
    read, write = os.pipe()
    with os.fdopen(read) as errors:
        done = subprocess.run(
            [sys.executable, "-c", TALKATIVE, str(log)], stdout=subprocess.PIPE, stderr=write, check=True
        )
        os.close(write)
        told = errors.read()

    assert done.stdout == b"False\n"
    assert told.startswith("WARNING line 0\n")
    assert log.read_text() == "old\n"
