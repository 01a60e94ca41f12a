"""What an operator installs holds all of kvtop, whether built from the repository or from its sdist."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.repository import ROOT, run, tracked

SHIPPED = ("agents/", "connector/", "console/", "themes/")


def build(what: str, source: Path, into: Path) -> Path:
    """Build a `wheel` or an `sdist` with the pinned setuptools, and return it."""
    into.mkdir()
    code = f"import setuptools.build_meta as b, sys; sys.stderr.write(b.build_{what}({str(into)!r}))"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files alone, in a folder of their own."""
    root = tmp_path_factory.mktemp("repository")
    for path in tracked():
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for link in (path for path in (ROOT / "src/kvtop").iterdir() if path.is_symlink()):
        (root / "src/kvtop" / link.name).symlink_to(link.readlink())
    return root


@pytest.fixture(scope="module")
def sdist(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    into = tmp_path_factory.mktemp("sdist")
    run("tar", "-xf", build("sdist", repository, into / "dist"), "-C", into)
    (unpacked,) = (path for path in into.iterdir() if path.name != "dist")
    return unpacked


@pytest.mark.parametrize("source", ["repository", "sdist"])
def test_a_wheel_holds_every_module_theme_and_style(
    source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    wheel = build("wheel", request.getfixturevalue(source), tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        entry_points = archive.read(next(n for n in held if n.endswith("entry_points.txt"))).decode()

    names = {path.relative_to(ROOT).as_posix() for path in tracked()}
    wanted = {f"kvtop/{name}" for name in names if name.startswith(SHIPPED)}
    assert wanted | {"kvtop/__init__.py", "kvtop/__main__.py", "kvtop/py.typed"} == {
        name for name in held if name.startswith("kvtop/")
    }
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"kvtop"}
    assert "kvtop = kvtop.__main__:main" in entry_points
    assert "kvtop-agent = kvtop.agents.cli:main" in entry_points
    assert "[vllm.stat_logger_plugins]\nkvtop = kvtop.connector.stat_logger:KvtopStatLogger" in entry_points
