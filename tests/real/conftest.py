"""Fixtures for tests on real vLLM servers.

A pair takes half a minute to start and 7 GB, so each configuration is started once and kept until a test
asks for another one (pytest orders the tests by configuration); the aggregated server stays throughout.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from kvtop.console.demo.servers import Server
from tests.support.pair import RunningPair, running_alone, running_pair


@pytest.fixture(scope="session")
def aggregated() -> Iterator[Server]:
    """A server that does prefill and decode itself: what it answers is right by definition."""
    with running_alone() as server:
        yield server


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest) -> Iterator[RunningPair | None]:
    """The pair of the configuration that the test is parametrised with; None ends the one that runs."""
    if request.param is None:
        yield None
        return
    with running_pair(request.param) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the ends of the servers' logs to a failed test."""
    del call
    report = yield
    running = getattr(item, "funcargs", {}).get("pair")
    if report.failed and isinstance(running, RunningPair):
        for log in sorted(running.processes.logs.glob("*.log")):
            report.sections.append((f"end of {log.name}", log.read_text(errors="replace")[-6000:]))
    return report
