"""What must hold for the files of the repository themselves, so that a fresh clone works on any machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.repository import ROOT, run, tracked

PINS = sorted(ROOT.glob("requirements*.txt"))

# Character classes keep these patterns from matching this file.
OF_ONE_MACHINE = re.compile(
    r"py[p]i\.org|python[h]osted|index-[u]rl|find-[l]inks|file:[/]/[\w/]"
    r"|(?<![\w.~$}/-])/(?:[w]ork|[r]oot|home/\w+|Users/\w+|opt/(?:py[p]i|whee[l]s)|tmp/[u]v)(?![\w-])"
)


def of_one_machine(text: str) -> list[str]:
    """Return the index addresses and the machine's own paths in a text."""
    return [found.group() for found in OF_ONE_MACHINE.finditer(text)]


def targets() -> set[str]:
    """Return the targets that the Makefile offers."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def pinned(path: Path) -> dict[str, list[Requirement]]:
    """Return a pin file's requirements by name; one name may have several, each for other Pythons."""
    found: dict[str, list[Requirement]] = {}
    for entry in path.read_text("utf-8").replace("\\\n", " ").splitlines():
        requirement = Requirement(entry.partition(" --hash=")[0])
        found.setdefault(requirement.name, []).append(requirement)
    return found


def test_no_file_holds_an_index_address_or_a_path_of_one_machine() -> None:
    offences = {
        str(path.relative_to(ROOT)): found
        for path in tracked()
        if (found := of_one_machine(path.read_text("utf-8", errors="replace")))
    }

    assert offences == {}


@pytest.mark.parametrize(
    "text",
    [
        "https://py" + "pi.org/simple",
        "files.python" + "hosted.org",
        "--extra-index-" + "url x",
        "file:/" + "//srv/wheels",
        "see /" + "work/notes",
        'home = "/' + 'root/.cache"',
        "/" + "home/someone/kvtop",
    ],
)
def test_such_an_address_or_path_would_be_found(text: str) -> None:
    assert of_one_machine(text)


@pytest.mark.parametrize(
    "text", ["src/work/x", "~/work", "tests/root", "/usr/sbin/sshd", "at https://example.org"]
)
def test_other_paths_are_let_be(text: str) -> None:
    assert of_one_machine(text) == []


def test_uvs_lock_file_stays_out() -> None:
    """It records index addresses."""
    assert ROOT / "uv.lock" not in tracked()
    assert run("git", "check-ignore", "uv.lock").stdout.strip() == "uv.lock"


def test_the_package_links_to_the_top_level_folders_from_wherever_the_clone_is() -> None:
    links = {path.name: path for path in (ROOT / "src/kvtop").iterdir() if path.is_symlink()}

    assert sorted(links) == ["agents", "connector", "console", "themes"]
    for name, link in links.items():
        assert str(link.readlink()) == f"../../{name}"
        assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_each_make_command_that_is_written_down_exists(document: str) -> None:
    told = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / document).read_text("utf-8"), re.MULTILINE))

    assert told >= {"test"}
    assert told <= targets()


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.name)
def test_every_pin_is_exact_and_has_a_hash(path: Path) -> None:
    for entry in path.read_text("utf-8").replace("\\\n", " ").splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", entry), entry


def test_the_pins_are_those_that_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["vllm-cpu"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    pins = pinned(ROOT / "requirements.txt")

    for requirement in map(Requirement, asked):
        assert requirement.name in pins, f"{requirement} is not pinned: run `make pins`"
        for pin in pins[requirement.name]:
            version = next(iter(pin.specifier)).version
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
