"""The record of commands: private, bounded, whole lines only, and never in the way."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from kvtop.agents.audit import AuditLog


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_records_are_lines_of_json_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)

    assert [audit.write({"number": number, "text": "a\n%s ü"}) for number in range(3)] == ["", "", ""]

    assert records(path) == [{"number": number, "text": "a\n%s ü"} for number in range(3)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_old_records_make_way_when_there_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, max_bytes=1000, files_kept=2)
    for number in range(200):
        assert audit.write({"number": number}) == ""

    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(each.stat().st_size <= 1000 and stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files)
    kept = [record["number"] for each in (files[2], files[1], files[0]) for record in records(each)]
    assert kept == list(range(kept[0], 200))


def test_what_another_agent_left_is_kept_and_its_torn_end_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"number":1}\n{"numb')

    assert AuditLog(path).write({"number": 2}) == ""

    assert path.read_text() == '{"number":1}\n{"numb\n{"number":2}\n'


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.write({"number": 1})
    path.rename(tmp_path / "archived")

    audit.write({"number": 2})

    assert records(path) == [{"number": 2}]


@pytest.mark.parametrize("obstacle", ["no folder", "a folder in its place", "a link in its place"])
def test_an_obstacle_is_told_and_recording_goes_on_once_it_is_gone(tmp_path: Path, obstacle: str) -> None:
    folder = tmp_path / "run"
    path = folder / "audit.jsonl"
    audit = AuditLog(path)
    if obstacle != "no folder":
        folder.mkdir()
    if obstacle == "a folder in its place":
        path.mkdir()
    if obstacle == "a link in its place":
        path.symlink_to(tmp_path / "elsewhere")

    assert f"{path} cannot be written: " in audit.write({"number": 1})
    assert not (tmp_path / "elsewhere").exists()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    assert audit.write({"number": 2}) == ""
    assert records(path) == [{"number": 2}]


def test_a_full_disk_is_told_and_recording_goes_on_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    assert audit.write({"number": 1}) == ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, before[1]))
    try:
        problem = audit.write({"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

    assert "cannot be written: File too large" in problem
    assert audit.write({"number": 3}) == ""
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in (lines[0], lines[-1])] == [1, 3]
    assert len(lines) <= 3  # the torn record is a line of its own


def test_an_agent_without_an_audit_file_says_so() -> None:
    assert AuditLog(None).write({}) == "this agent keeps no audit file"


def test_what_no_json_can_hold_is_told(tmp_path: Path) -> None:
    assert "cannot be written" in AuditLog(tmp_path / "audit.jsonl").write({"x": object()})


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        audit.write({"number": number})

    assert len(list(Path("/proc/self/fd").iterdir())) == before
