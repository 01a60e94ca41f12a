"""The repository as git and a shell see it, for tests about its own files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    """Return the files that git tracks, links left out; skips the test where there is no git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    listed = run("git", "ls-files", "-z").stdout.split("\0")
    return [path for name in listed if name and (path := ROOT / name).is_file() and not path.is_symlink()]


def modules(package: str) -> Iterator[str]:
    """Yield the dotted names of a layer and of every module below it, read off the files."""
    top = ROOT / package.removeprefix("kvtop.").replace(".", "/")
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        name = ".".join((package, *parts)).removesuffix(".__init__")
        if not name.endswith("__main__"):
            yield name


def run(
    *argv: str | Path, cwd: Path = ROOT, check: bool = True, timeout_s: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with `env` over this process's environment, and return its exit code and its output."""
    return subprocess.run(
        argv,
        cwd=cwd,
        check=check,
        timeout=timeout_s,
        text=True,
        capture_output=True,
        env={**os.environ, **env},
    )


def python(code: str, *, cwd: Path = ROOT) -> str:
    """Run code in a fresh interpreter, and return what it printed."""
    return run(sys.executable, "-c", code, cwd=cwd).stdout
