"""What the README and the page for operators tell people to type is what the programs take."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvtop.connector.config import read_settings
from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text("utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
TOLD = re.compile(r"(?:^\s*|`)((?:kvtop|kvtop-agent) (?:[^`#\n]+))", re.MULTILINE)


def told() -> list[list[str]]:
    """Return the kvtop commands that both show, as argument lists."""
    return [shlex.split(line) for text in (README, OPERATIONS) for line in TOLD.findall(text)]


def test_there_are_commands_to_check() -> None:
    assert {command[0] for command in told()} == {"kvtop", "kvtop-agent"}


@pytest.mark.parametrize("command", told(), ids=" ".join)
def test_every_option_that_is_shown_exists(command: list[str]) -> None:
    program, *arguments = command
    options = [word for word in arguments if word.startswith("--")]
    verb = arguments[:1] if arguments and re.fullmatch(r"[a-z]+", arguments[0]) else []
    module = "kvtop" if program == "kvtop" else "kvtop.agents.cli"

    shown = subprocess.run(
        [sys.executable, "-m", module, *verb, "--help"], capture_output=True, text=True, check=True
    ).stdout

    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize(("text", "name"), [(README, "prefill-0"), (OPERATIONS, "decode-0")])
def test_the_transfer_configuration_names_a_class_that_exists_and_settings_that_are_known(
    text: str, name: str
) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    config = json.loads(block)

    module = Path(ROOT / "connector" / "kvtop_connector.py").read_text("utf-8")
    assert config["kv_connector_module_path"] == "kvtop.connector"
    assert f"class {config['kv_connector']}(" in module
    assert read_settings(config["kv_connector_extra_config"]).name == name


def test_what_the_readme_says_of_the_defaults_is_so() -> None:
    assert "50 ports above" in README
    assert read_settings({}).pull_port_offset == 50
    assert "`kvtop_deadline_s` (60)" in README
    assert "`kvtop_deadline_s` (60)" in OPERATIONS
    assert read_settings({}).deadline_s == 60


def test_every_file_that_the_readme_shows_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_every_folder_of_the_layout_is_there() -> None:
    layout = re.findall(r"^([\w./]+)  +\S", README, re.MULTILINE)
    assert len(layout) >= 8
    for name in layout:
        assert (ROOT / name).exists(), name
