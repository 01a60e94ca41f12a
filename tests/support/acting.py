"""A node with an agent and engines that obey, and the command lines that act on it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from kvtop.agents.model import LIVE_STAGES, Instance, Snapshot, Transfer
from kvtop.agents.runtime import RuntimePaths
from tests.support.agent import await_snapshot, running_agent, snapshot

AGENT_CLI = [sys.executable, "-m", "kvtop.agents.cli"]
SIMULATE = [sys.executable, "-m", "kvtop.agents.simulate"]


@dataclass
class ActingNode:
    """An agent, and simulated engines that report to it."""

    paths: RuntimePaths
    agent: subprocess.Popen[str]
    engines: psutil.Process

    @property
    def environment(self) -> dict[str, str]:
        """In which every kvtop finds this node's agent."""
        return {**os.environ, "KVTOP_RUNTIME_DIR": str(self.paths.folder)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `kvtop-agent` with these arguments."""
        return subprocess.Popen(
            [*AGENT_CLI, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def act(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `kvtop-agent` with these arguments to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def act_json(self, *arguments: str) -> dict[str, Any]:
        """Run `kvtop-agent … --json`, and return the document; its exit code is the process's."""
        done = self.act(*arguments, "--json")
        assert done.stdout.count("\n") == 1, done
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["schema_version"] == 1
        assert document["exit_code"] == done.returncode
        return document

    def instance(self, name: str) -> Instance:
        """What the agent says of an instance."""
        return next(each for each in snapshot(self.paths).instances if each.name == name)

    def audit(self) -> list[dict[str, Any]]:
        """The records of all commands so far."""
        text = self.paths.audit.read_text("utf-8") if self.paths.audit.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


@contextlib.contextmanager
def acting_node(paths: RuntimePaths, *options: str, pairs: int = 2) -> Iterator[ActingNode]:
    """Run an agent and simulated engines; ready once all engines serve."""
    with running_agent(paths) as agent:
        environment = {**os.environ, "KVTOP_RUNTIME_DIR": str(paths.folder)}
        engines = subprocess.Popen(
            [*SIMULATE, "--pairs", str(pairs), "--failure-rate", "0", "--seed", "7", *options],
            env=environment,
        )
        try:
            await_snapshot(paths, lambda seen: _serving(seen, 2 * pairs), "the engines to report")
            yield ActingNode(paths, agent, psutil.Process(engines.pid))
        finally:
            if engines.poll() is None:
                psutil.Process(engines.pid).resume()
                engines.terminate()
            engines.wait(20)


def _serving(seen: Snapshot, count: int) -> bool:
    return len(seen.instances) == count and all(each.orders for each in seen.instances)


def lines_of(outcome: subprocess.CompletedProcess[str]) -> Sequence[str]:
    """What a command told people, line by line."""
    return outcome.stderr.splitlines()


def live(seen: Snapshot) -> list[Transfer]:
    """The transfers under way."""
    return [row for row in seen.transfers if row.stage in LIVE_STAGES]
