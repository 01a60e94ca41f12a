"""How long an operator waits for `kvtop --version`, against an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.paired import Ratio, ratio

KVTOP = Path(sys.executable).with_name("kvtop")


def measure() -> Iterator[Ratio]:
    """Yield the ratio of the two process start-ups."""
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    yield ratio(
        "kvtop --version / python -c pass",
        partial(run, [KVTOP, "--version"]),
        partial(run, [sys.executable, "-c", "pass"]),
    )
