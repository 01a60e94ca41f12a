"""`make bench`: prints each ratio as soon as it is measured.

Every module here with a `measure()`, which yields figures that print as one line, is a benchmark.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable

from tests import bench


def benchmarks() -> dict[str, Callable[[], Iterable[object]]]:
    """Return the `measure` functions by the names of their modules."""
    modules = (
        importlib.import_module(f"{bench.__name__}.{found.name}")
        for found in pkgutil.iter_modules(bench.__path__)
        if not found.name.startswith("_")
    )
    return {m.__name__.rpartition(".")[2]: m.measure for m in modules if hasattr(m, "measure")}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all of them; return the exit code."""
    known = benchmarks()
    if unknown := sorted(set(names) - set(known)):
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    for name in names or sorted(known):
        print(f"measuring {name}", file=sys.stderr, flush=True)
        for figure in known[name]():
            print(figure, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
