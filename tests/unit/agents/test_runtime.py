"""The runtime folder: found by one rule everywhere, private, and refused with the reason if it is not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvtop.agents.runtime import RuntimeFolderError, RuntimePaths


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert RuntimePaths.default().folder == tmp_path / "kvtop"

    monkeypatch.setenv("KVTOP_RUNTIME_DIR", "/run/elsewhere")
    assert RuntimePaths.default().folder == Path("/run/elsewhere")


def test_without_a_name_there_is_one_folder_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTOP_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert RuntimePaths.default().folder.name == "kvtop"


def test_a_path_that_no_unix_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFolderError, match=r"too long for a Unix socket.*KVTOP_RUNTIME_DIR"):
        RuntimePaths.at(tmp_path / ("x" * 120))


def test_the_folder_is_made_private(tmp_path: Path) -> None:
    paths = RuntimePaths.at(tmp_path / "rt")
    paths.prepare()
    paths.prepare()
    assert stat.S_IMODE(paths.folder.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rt"
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(
        RuntimeFolderError, match=r"is open to others \(mode 0750, 0700 is needed\): remove it"
    ):
        RuntimePaths.at(folder).prepare()


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever made it first, in a place that all can write to, would hear what the engines report."""
    owner, stranger = os.geteuid(), os.geteuid() + 1
    paths = RuntimePaths.at(tmp_path / "rt")
    paths.prepare()
    monkeypatch.setattr("os.geteuid", lambda: stranger)
    with pytest.raises(RuntimeFolderError, match=f"belongs to uid {owner}, not to {stranger}"):
        paths.prepare()


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "rt").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeFolderError, match="is no folder"):
        RuntimePaths.at(tmp_path / "rt").prepare()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFolderError, match=r"cannot be made \(.*\): set KVTOP_RUNTIME_DIR"):
        RuntimePaths.at(tmp_path / "file" / "rt").prepare()
