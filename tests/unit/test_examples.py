"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.support.repository import ROOT, modules

WITH_EXAMPLES = sorted(
    name
    for layer in ("kvtop.agents", "kvtop.connector", "kvtop.console")
    for name in modules(layer)
    for path in [ROOT / name.removeprefix("kvtop.").replace(".", "/")]
    if ">>>" in (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_each_example_gives_what_it_shows(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module), optionflags=doctest.FAIL_FAST)

    assert tried > 0
    assert failed == 0
