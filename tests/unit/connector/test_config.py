"""kvtop's settings: good ones are taken, a wrong one stops the engine at start and names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtop.connector.config import SettingError, Settings, read_settings


def test_nothing_set_means_the_defaults_and_upstreams_own_keys_are_not_ours() -> None:
    assert read_settings({"kv_lease_duration": 30, "backends": ["UCX"]}) == Settings()


def test_every_setting_is_taken() -> None:
    settings = read_settings(
        {
            "kvtop_mode": "pull",
            "kvtop_name": "decode-7",
            "kvtop_pull_port_offset": 7,
            "kvtop_progress_delay_us": 0,
            "kvtop_scatter_gather": True,
            "kvtop_deadline_s": 12.5,
            "kvtop_runtime_dir": "/run/kvtop",
            "kvtop_report": False,
        }
    )

    assert settings == Settings(
        mode="pull",
        name="decode-7",
        pull_port_offset=7,
        progress_delay_us=0,
        scatter_gather=True,
        deadline_s=12.5,
        runtime_dir=Path("/run/kvtop"),
        report=False,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvtop_mode", "both"),
        ("kvtop_mode", ["push"]),
        ("kvtop_name", ""),
        ("kvtop_name", 3),
        ("kvtop_pull_port_offset", 0),
        ("kvtop_pull_port_offset", True),
        ("kvtop_progress_delay_us", -1),
        ("kvtop_progress_delay_us", 1.5),
        ("kvtop_scatter_gather", "y"),
        ("kvtop_deadline_s", 0),
        ("kvtop_deadline_s", "60"),
        ("kvtop_runtime_dir", None),
        ("kvtop_report", "yes"),
        ("kvtop_moed", "push"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingError, match=key):
        read_settings({key: value})
