"""Which layer may look at which: `console` and `connector` see `agents`, and none what it must not load.

The import contracts read the source, late imports included. A fresh interpreter shows what is really loaded,
through other packages too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.repository import ROOT, modules, python, run

BIN = Path(sys.executable).parent
LAYERS = ("agents", "connector", "console", "themes")
ENGINE = ("vllm", "nixl", "torch")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the product's source, to break."""
    for name in (*LAYERS, "src"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def contracts_broken(root: Path) -> str:
    """Return the report of import-linter on the broken contracts of a source tree; empty if all hold."""
    ended = run(BIN / "lint-imports", "--no-cache", cwd=root, check=False, PYTHONPATH=str(root / "src"))
    return ended.stdout + ended.stderr if ended.returncode else ""


def loaded(imports: Iterable[str], unwanted: Iterable[str]) -> set[str]:
    """Return which of the unwanted packages a fresh interpreter holds after these imports."""
    code = f"import sys, {', '.join(imports)}; print(*sys.modules)"
    return set(unwanted) & set(python(code).split())


def test_every_contract_holds() -> None:
    assert contracts_broken(ROOT) == ""


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("agents", "import kvtop.console"),
        ("agents", "import kvtop.connector"),
        ("agents", "import vllm"),
        ("agents", "import nixl"),
        ("agents", "import torch"),
        ("agents", "import textual"),
        ("connector", "import kvtop.console"),
        ("connector", "import textual"),
        ("console", "import kvtop.connector"),
        ("console/fleet", "import textual"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at the top", "within a function"])
def test_a_look_the_wrong_way_is_found(copy: Path, layer: str, line: str, late: bool) -> None:
    (copy / layer / "wrong.py").write_text(f"def late():\n    {line}\n" if late else f"{line}\n")

    report = contracts_broken(copy)

    assert f"kvtop.{layer.replace('/', '.')}.wrong" in report
    assert "BROKEN" in report


def test_the_agent_loads_no_engine_and_no_terminal_library() -> None:
    assert loaded(modules("kvtop.agents"), [*ENGINE, "textual"]) == set()


def test_the_consoles_core_loads_no_engine_and_no_terminal_library() -> None:
    assert loaded(modules("kvtop.console.fleet"), [*ENGINE, "textual"]) == set()


def test_the_command_line_waits_for_no_heavy_import() -> None:
    assert loaded(["kvtop.console.cli"], [*ENGINE, "textual", "asyncssh"]) == set()


def test_what_must_not_be_loaded_is_seen_when_it_is() -> None:
    assert loaded(["textual.app", "asyncssh"], ["textual", "asyncssh", "vllm"]) == {"textual", "asyncssh"}


def test_the_version_is_told_without_loading_anything_else_of_kvtop() -> None:
    ended = run(sys.executable, "-X", "importtime", BIN / "kvtop", "--version")
    packages = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}

    assert ended.stdout.startswith("kvtop ")
    assert {name for name in packages if name.startswith("kvtop")} == {"kvtop", "kvtop.__main__"}
    assert packages & {"click", "rich", "msgspec", "asyncio", "importlib.metadata"} == set()
