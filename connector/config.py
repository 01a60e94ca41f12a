"""kvtop's own settings, read from `kv_connector_extra_config` beside upstream's.

A misspelt or impossible setting stops the engine at start, with the key named: later it would be a silent
surprise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtop.agents.events import Direction

PREFIX = "kvtop_"
MAX_PORT = 65535


class SettingError(ValueError):
    """A `kvtop_*` key of `kv_connector_extra_config` is unknown or has an impossible value."""


@dataclass(frozen=True)
class Settings:
    """What an operator can set for kvtop's connector; each field is the key `kvtop_<field>`."""

    mode: Direction = "push"
    """Direction of requests that do not name one."""
    name: str | None = None
    """The instance's name on screen; by default its role and side-channel port."""
    pull_port_offset: int = 50
    """The pull half's handshake port is the push half's plus this. The push half keeps
    VLLM_NIXL_SIDE_CHANNEL_PORT (plus the data-parallel index). TCP ports."""
    progress_delay_us: int | None = None
    """How long NIXL's progress thread sleeps between polls, µs; 0 makes it spin. By default 10000 on
    CPU, where cores are few, and upstream's setting elsewhere."""
    scatter_gather: bool = False
    """Whether NIXL hands all descriptors of a write to UCX at once (`NIXL_UCX_SGL_ENABLE`); an environment
    that sets this variable wins. False leaves it to NIXL, whose default is one call a descriptor. Thousands
    of small descriptors gain over tcp, and nothing does over cma (`make bench`). UCX is reported to refuse
    such writes where none of its lanes has enough bandwidth: https://github.com/openucx/ucx/pull/11943."""
    deadline_s: float = 60.0
    """How long a decode request waits for its KV after its blocks are allocated, in seconds; then it goes on
    without (`kv_load_failure_policy` says how)."""
    runtime_dir: Path | None = None
    """The node agent's runtime folder; by default the agent's own default."""
    report: bool = True
    """Whether to report to the node agent at all."""


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Return the settings in `extra`.

    Raises:
        SettingError: a `kvtop_*` key is unknown or its value is impossible.
    """
    given = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    unknown = sorted(given.keys() - Settings.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(PREFIX + name for name in Settings.__dataclass_fields__)
        raise SettingError(
            f"kv_connector_extra_config: unknown key {PREFIX}{unknown[0]}; kvtop's keys are {known}"
        )
    for key, value in given.items():
        _check(key, value)
    if "runtime_dir" in given:
        given["runtime_dir"] = Path(given["runtime_dir"])
    return Settings(**given)


def _check(key: str, value: object) -> None:
    """Raise SettingError unless `value` is possible for `key`."""
    allowed: dict[str, tuple[str, bool]] = {
        "mode": ('"push" or "pull"', value in ("push", "pull")),
        "name": ("a non-empty text", isinstance(value, str) and bool(value.strip())),
        "pull_port_offset": ("a whole number from 1 to 10000", _whole(value, 1, 10_000)),
        "progress_delay_us": ("a whole number of µs from 0 to 1000000", _whole(value, 0, 1_000_000)),
        "scatter_gather": ("true or false", isinstance(value, bool)),
        "deadline_s": ("a number of seconds from 0.1 to 86400", _number(value, 0.1, 86_400)),
        "runtime_dir": ("the path of a folder", isinstance(value, str) and bool(value)),
        "report": ("true or false", isinstance(value, bool)),
    }
    expected, good = allowed[key]
    if not good:
        raise SettingError(f"kv_connector_extra_config: {PREFIX}{key} must be {expected}, not {value!r}")


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
