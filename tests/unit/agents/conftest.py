"""Nodes with an agent and simulated engines, under the loads that commands meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtop.agents.runtime import RuntimePaths
from tests.support.acting import ActingNode, acting_node, live
from tests.support.agent import await_snapshot, runtime_folder


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture
def node(paths: RuntimePaths) -> Iterator[ActingNode]:
    """Two pairs of engines under a steady load."""
    with acting_node(paths, "--rate", "20") as running:
        yield running


@pytest.fixture
def quiet_node(paths: RuntimePaths) -> Iterator[ActingNode]:
    """Two pairs of engines that nobody asks anything."""
    with acting_node(paths, "--rate", "0.001") as running:  # the first request comes at once
        await_snapshot(paths, lambda seen: seen.transfers and not live(seen), "the only transfer to end")
        yield running


@pytest.fixture
def slow_node(paths: RuntimePaths) -> Iterator[ActingNode]:
    """A pair of engines whose every transfer waits for its lease to end."""
    with acting_node(paths, "--rate", "20", "--failure-rate", "1", "--seed", "3", pairs=1) as running:
        yield running
