"""How often the kernel killed for lack of memory, where it lets this process know.

A memory cgroup counts its own (`oom_kill` in cgroup v2's memory.events, in v1's memory.oom_control); where no
such count can be read, the node's (/proc/vmstat) has to do, which says less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtop.agents.engine_log import PROC

CGROUPS: Final = Path("/sys/fs/cgroup")


def oom_count_file(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> Path | None:
    """Return the file that counts out-of-memory kills where a process lives; None where none is readable.

    >>> oom_count_file(1, Path("/nowhere"), Path("/nowhere")) is None
    True
    """
    candidates = [*_of_cgroup(pid, proc, cgroups), proc / "vmstat"]
    return next((path for path in candidates if oom_count(path) is not None), None)


def _of_cgroup(pid: int, proc: Path, cgroups: Path) -> list[Path]:
    """Return where a process's memory cgroup would count: what v1 or v2 mounts, whichever is there."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        inside = path.lstrip("/")
        if ".." in Path(inside).parts:  # outside of this process's own cgroup namespace
            continue
        if controllers == "":
            found.append(cgroups / inside / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroups / "memory" / inside / "memory.oom_control")
    return found


def oom_count(path: Path | None) -> int | None:
    """Return the count in such a file."""
    try:
        lines = path.read_text().splitlines() if path else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None
