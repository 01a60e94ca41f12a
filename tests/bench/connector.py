"""What kvtop's connector costs a request: the same prompts to a pair with it and to one with vLLM's own.

Both pairs stay up, and one is stopped (SIGSTOP) while the other is measured: vLLM's own NIXL agents spin a
core each, which on few cores would be counted against whoever else runs. kvtop's do not, so it is measured
with and without that.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Self

import httpx
import psutil

from kvtop.console.demo.load import Prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.processes import Processes
from tests.bench.paired import Ratio, ratio
from tests.support.pair import RunningPair, complete_all, start_in

PAIRS = 60
IN_FLIGHT = (1, 4)
SEED = 1
PATIENT = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
"""A server that rests must not find, on waking, that the router's connections have been idle too long."""
OURS = {
    "kvtop-push": "KvtopConnector",
    "kvtop-push-spinning": "KvtopConnector with NIXL's thread spinning as upstream's",
}


def measure() -> Iterator[Ratio | str]:
    """Yield the ratios of TTFT through the router, kvtop's push to stock push, by requests in flight."""
    for ours, what in OURS.items():
        with Processes() as processes:
            yield from _compare(processes, ours, what)


def _compare(processes: Processes, connector: str, what: str) -> Iterator[Ratio | str]:
    model = make_model(processes.folder / "model")
    pairs = [
        start_in(processes, name, model, prefix=prefix, settings=PATIENT)
        for name, prefix in ((connector, "kvtop-"), ("stock-push", "stock-"))
    ]
    with Contender(pairs[0]) as ours, Contender(pairs[1]) as theirs:
        for in_flight in IN_FLIGHT:
            title = f"TTFT of {what} / NixlPushConnector, push, {in_flight} in flight"
            try:
                answers = (partial(each.answer, in_flight) for each in (ours, theirs))
                yield ratio(title, *answers, pairs=PAIRS)
            except httpx.TimeoutException as error:
                yield f"{title}: not measured, a request got no answer ({error})"
                return


class Resting:
    """A pair that takes no processor but when it is woken, and goes on when it is no longer measured."""

    def __init__(self, pair: RunningPair) -> None:
        ports = {str(server.port) for server in pair.pair.servers}
        servers = [each for each in psutil.process_iter() if ports & set(command_of(each))]
        self._processes = [
            process for server in servers for process in (server, *server.children(recursive=True))
        ]

    def __enter__(self) -> Self:
        self.rest()
        return self

    def __exit__(self, *_: object) -> None:
        self.wake()

    def cpu_s(self) -> float:
        """Return the processor time that the servers have taken so far, in seconds."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def rest(self) -> None:
        """Take no processor."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)


class Contender(Resting):
    """A pair that is measured through its router."""

    def __init__(self, pair: RunningPair) -> None:
        super().__init__(pair)
        self._url = pair.url
        self._prompts = prompts()

    def answer(self, in_flight: int) -> None:
        """Answer the next prompts, all at once, with one token each."""
        self.wake()
        complete_all(self._url, list(itertools.islice(self._prompts, in_flight)), in_flight=in_flight)
        self.rest()


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line if it is a vLLM server's."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return []
    return command if "vllm.entrypoints.openai.api_server" in command else []


def prompts() -> Iterator[Prompt]:
    """Yield prompts of 1,000 tokens that share no beginning; every call yields the same ones."""
    rng = random.Random(SEED)
    for number in itertools.count():
        words = " ".join(f"{rng.getrandbits(32):x}" for _ in range(130))
        yield Prompt(f"{number:x} {words}"[:1000], 1)
