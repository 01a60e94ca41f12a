"""What the demo does once the machine is known to be fit: start everything, then show it or count it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Final

from kvtop.console.demo.access import make_keys, runtime_environment, start_agent
from kvtop.console.demo.deployment import start_pair
from kvtop.console.demo.figures import SCHEMA_VERSION, as_text, client_figures, ledger_figures
from kvtop.console.demo.headless import Ledger, ended_with, read_outcomes
from kvtop.console.demo.model import make_model
from kvtop.console.demo.ports import Ports
from kvtop.console.demo.processes import Processes, Running
from kvtop.console.demo.servers import kvtop_connector
from kvtop.console.demo.steps import Steps
from kvtop.console.fleet.dial import DialOptions
from kvtop.console.fleet.targets import parse_targets

SIMULATION: Final = "simulated-engines"
LOAD: Final = "load"
LOAD_MARGIN_S: Final = 180.0
"""How much longer than the rate says a load may take."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    mode: str
    rate_per_s: float
    simulated: bool
    requests: int
    """Only for the headless demo; the console's load is endless."""


class Show:
    """One demo, from its first process to the console's end. Whoever made `processes` ends them."""

    def __init__(self, wanted: Wanted, processes: Processes, ports: Ports, steps: Steps) -> None:
        """Prepare; nothing starts before `start`."""
        self._wanted = wanted
        self._processes = processes
        self._ports = ports
        self._steps = steps
        self._url = ""
        self._startup_s: dict[str, float] = {}

    def start(self) -> None:
        """Start the agent, then the engines and the router.

        Raises:
            ProcessFailed, NotReady: something did not start; the message holds the end of its log.
        """
        began = time.monotonic()
        with self._steps.step("agent", "Start the node agent, its SSH server and throw-away keys"):
            self._access = make_keys(self._processes.folder / "keys", self._ports.ssh)
            start_agent(self._processes, self._access)
        if self._wanted.simulated:
            with self._steps.step("engines", "Start simulated engines (no vLLM, no KV moves)"):
                self._start_simulation()
        else:
            self._start_pair()
        self._startup_s = {**self._steps.seconds, "total": round(time.monotonic() - began, 2)}

    def _start_pair(self) -> None:
        with self._steps.step("model", "Make a tiny Llama with random weights"):
            model = make_model(self._processes.folder / "model")
        text = "Start prefill and decode vLLM servers, and the router"
        with self._steps.step("servers", text) as note:
            pair = start_pair(
                self._processes,
                self._ports,
                model,
                kvtop_connector(self._wanted.mode),
                env=runtime_environment(self._processes.folder),
                on_ready=lambda name: note(f"{name} is ready"),
            )
        self._url = pair.router_url

    def _start_simulation(self) -> None:
        argv = [
            *(sys.executable, "-P", "-m", "kvtop.agents.simulate"),
            *("--rate", str(self._wanted.rate_per_s), "--mode", self._wanted.mode),
        ]
        self._processes.start(SIMULATION, argv, runtime_environment(self._processes.folder))

    def _start_load(self, requests: int | None) -> Running:
        argv = [
            *(sys.executable, "-P", "-m", "kvtop.console.demo.load"),
            *("--url", self._url, "--rate", str(self._wanted.rate_per_s)),
        ]
        return self._processes.start(LOAD, argv if requests is None else [*argv, "--requests", str(requests)])

    @property
    def _options(self) -> DialOptions:
        return DialOptions((self._access.identity,), self._access.known_hosts)

    def console(self) -> int:
        """Open the console, attached over SSH, until the person leaves it; return its exit code."""
        from kvtop.console.terminal import run_terminal  # noqa: PLC0415 - textual is for this way only

        if not self._wanted.simulated:
            self._start_load(None)
        return run_terminal(parse_targets([self._access.target]), self._options)

    def figures(self, *, as_json: bool) -> int:
        """Send the requests, print the figures on stdout, and return 0 if every request went well.

        Raises:
            ConnectError: the agent cannot be reached over SSH.
            ProcessFailed, NotReady: the load broke off or did not end.
        """
        requests = self._wanted.requests
        ledger = Ledger(self._access.target, self._options)
        text = (
            f"Watch {requests} simulated transfers" if self._wanted.simulated else f"Send {requests} requests"
        )
        with self._steps.step("requests", text):
            load = None if self._wanted.simulated else self._start_load(requests)
            timeout_s = 3 * requests / self._wanted.rate_per_s + LOAD_MARGIN_S
            asyncio.run(ledger.follow(ended_with(ledger, load, requests, self._check), timeout_s))
        client = client_figures(read_outcomes(load)) if load else None
        figures = {
            "schema_version": SCHEMA_VERSION,
            "mode": self._wanted.mode,
            "simulated": self._wanted.simulated,
            "requests": requests,
            "client": client,
            "transfers": ledger_figures(ledger.rows.values()),
            "startup_s": self._startup_s,
        }
        sys.stdout.write((json.dumps(figures, indent=2) if as_json else as_text(figures)) + "\n")
        return 0 if client is None or client["failed"] == 0 else 1

    def _check(self) -> None:
        """Raise ProcessFailed if the load or the simulation broke off."""
        name = SIMULATION if self._wanted.simulated else LOAD
        if self._processes.exit_code(name) not in (None, 0):
            self._processes.check(name)
