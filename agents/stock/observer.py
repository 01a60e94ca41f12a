"""Servers without kvtop's connector, read over and over and shown as instances that are only observed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args
from urllib.parse import urlsplit

from kvtop.agents.events import Role
from kvtop.agents.facts import BucketedLatency
from kvtop.agents.latency import NS, WINDOW_S
from kvtop.agents.model import Instance, InstanceState
from kvtop.agents.stock.exposition import Malformed
from kvtop.agents.stock.fetch import Unreachable, client, fetch
from kvtop.agents.stock.reading import Reading, read
from kvtop.agents.stock.window import HistogramWindow
from kvtop.agents.text import printable

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("kvtop.agent")

INTERVAL_S: Final = 2.0
LONGEST_PAUSE_S: Final = 30.0
"""Between attempts to read a server that does not answer."""
DOWN_AFTER_S: Final = 15.0
"""How long a server that answered before may be silent until it is held to be down."""


@dataclass(frozen=True)
class Target:
    """One server that is to be observed."""

    url: str
    name: str
    role: Role | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Understand `URL[,role=ROLE][,name=NAME]`; the path is `/metrics` unless one is named.

        >>> Target.parse("http://10.0.0.7:8000,role=decode")
        Target(url='http://10.0.0.7:8000/metrics', name='10.0.0.7:8000', role='decode')

        Raises:
            ValueError: it cannot be understood; the message says why.
        """
        url, *options = text.split(",")
        given = dict(option.partition("=")[::2] for option in options)
        if unknown := given.keys() - {"role", "name"}:
            raise ValueError(f"{text!r}: {sorted(unknown)[0]!r} is neither role=… nor name=…")
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for what is no port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"{url!r} is no http://HOST:PORT or https://HOST:PORT (without a user name)")
        role = given.get("role")
        if role is not None and role not in get_args(Role):
            raise ValueError(f"{text!r}: the role is one of {', '.join(get_args(Role))}")
        address = parts._replace(path=parts.path if parts.path.strip("/") else "/metrics", fragment="")
        found: Role | None = next((each for each in get_args(Role) if each == role), None)
        return cls(address.geturl(), printable(given.get("name") or parts.netloc), found)


class Observed:
    """What is known of one server."""

    def __init__(self, target: Target, now_ns: int) -> None:
        """Begin without an answer."""
        self.target = target
        self.failures = 0
        self._reading: Reading | None = None
        self._software = ""
        self._ttft, self._itl = HistogramWindow(), HistogramWindow()
        self._answered_ns: int | None = None
        self._since_ns = now_ns
        self._state: InstanceState = "starting"
        self._reason = "it has not answered yet"

    def answered(self, text: str, now_ns: int) -> None:
        """Take an answer.

        Raises:
            Malformed: it cannot be understood.
        """
        reading = read(text)
        self._reading, self._software = reading, reading.software
        self._ttft.add(now_ns, reading.ttft)
        self._itl.add(now_ns, reading.itl)
        self.failures, self._answered_ns = 0, now_ns
        self._enter("serving", now_ns, "")

    def failed(self, reason: str, now_ns: int) -> None:
        """Take note that there was no answer. What it said last is kept for as long as it may still hold."""
        self.failures += 1
        silent_since_ns = self._answered_ns or self._since_ns
        known = self._reading is not None
        if known and now_ns - silent_since_ns < DOWN_AFTER_S * NS:
            self._enter("stale", silent_since_ns, f"{self.target.url}: {reason}")
            return
        self._reading = None
        self._ttft.add(now_ns, None)
        self._itl.add(now_ns, None)
        self._enter("down", silent_since_ns, f"{self.target.url}: {reason}")

    def _enter(self, state: InstanceState, since_ns: int, reason: str) -> None:
        if state != self._state:
            self._state, self._since_ns = state, since_ns
        self._reason = printable(reason)

    def freeze(self) -> Instance:
        """Return it as a value for consoles."""
        reading = self._reading or Reading(self._software)
        ttft, itl = self._ttft.buckets(), self._itl.buckets()
        return Instance(
            engine_id=f"observed:{self.target.url}",
            name=self.target.name,
            role=self.target.role or reading.role or "both",
            mode=None,
            state=self._state,
            state_since_ns=self._since_ns,
            state_reason=self._reason,
            model=printable(reading.model),
            software=self._software,
            tp_size=None,
            running=reading.running,
            waiting=reading.waiting,
            kv_usage=reading.kv_usage,
            transfers_done=None,
            observed=f"{self._software} /metrics".strip(),
            queues={printable(name): depth for name, depth in reading.queues.items()},
            latency_buckets=BucketedLatency(WINDOW_S, ttft, itl) if ttft or itl else None,
            kv_counters=reading.counters,
        )


class Observers:
    """Reads all targets, each on its own: one that hangs keeps no other waiting."""

    def __init__(
        self,
        targets: list[Target],
        *,
        interval_s: float = INTERVAL_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Prepare to read `targets`; nothing happens before `run`."""
        now_ns = time.monotonic_ns()
        self._observed = [Observed(target, now_ns) for target in targets]
        self._interval_s = interval_s
        self._draw = draw

    def freeze(self) -> list[Instance]:
        """Return them as values for consoles."""
        return [each.freeze() for each in self._observed]

    async def run(self) -> None:
        """Read until cancelled."""
        async with client() as through, asyncio.TaskGroup() as tasks:
            for each in self._observed:
                tasks.create_task(self._follow(each, through))

    async def _follow(self, observed: Observed, through: httpx.AsyncClient) -> None:
        while True:
            try:
                text = await fetch(through, observed.target.url)
                observed.answered(text, time.monotonic_ns())
            except (Unreachable, Malformed) as error:
                if not observed.failures:
                    logger.info("cannot observe %s: %s", observed.target.url, error)
                observed.failed(str(error), time.monotonic_ns())
            except Exception as error:
                logger.exception(
                    "a bug in kvtop kept %s from being read; please report it", observed.target.url
                )
                observed.failed(f"a bug in kvtop: {error!r}", time.monotonic_ns())
            await asyncio.sleep(self._pause_s(observed.failures))

    def _pause_s(self, failures: int) -> float:
        pause_s = min(LONGEST_PAUSE_S, self._interval_s * 2.0 ** min(failures, 10))
        return (pause_s if failures else self._interval_s) * (0.9 + 0.2 * self._draw())
