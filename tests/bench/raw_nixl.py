"""Two NIXL agents in processes of their own, and writes between them: what NIXL does where no engine is.

The agents are opened as kvtop's connector opens its own. Their memory is used as a KV cache is: all of it is
registered and prepared once, and each write takes other slots of it, in an order of its own on each side, so
that NIXL can merge no two descriptors. The target looks at what it has got as soon as it has the
notification, which is when a decode engine would use it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

START_TIMEOUT_S = 120.0
TRANSFER_TIMEOUT_S = 60.0
CACHE_BYTES = 128 << 20
"""At least so much memory is written to in turn, several times the last-level cache."""
NOTIFICATION = b"written"
WORD = 8


class Shape(NamedTuple):
    """What is written at once."""

    descriptors: int
    bytes_each: int
    """A multiple of 8."""

    @property
    def slots(self) -> int:
        """How many descriptors the memory has room for; every other one stays unused."""
        return max(2 * self.descriptors, CACHE_BYTES // self.bytes_each)

    def choose(self, seed: str) -> list[int]:
        """Return the slots of one write, no two of them adjacent."""
        return random.Random(seed).sample(range(0, self.slots - 1, 2), self.descriptors)


class Written(NamedTuple):
    """NIXL's figures of one write, as kvtop reports them of its own."""

    bytes: int
    descriptors: int
    """After NIXL has merged what is contiguous."""
    post_us: float
    wire_us: float
    """From the post until the poll that saw the completion."""


class WrongBytesError(AssertionError):
    """The target was notified, and its memory was not what had been written."""


class RawPair:
    """An initiator and a target with host memory, over UCX on the loopback interface."""

    def __init__(
        self, *, progress_delay_us: int | None, poll_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start both processes.

        Args:
            progress_delay_us: see `kvtop.connector.upstream.open_nixl_agent`.
            poll_s: how often the initiator looks for the completion, and the target for notifications.
            environment: further variables, set before NIXL is loaded.
        """
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for side in (Target, Initiator):
            ours, theirs = context.Pipe()
            arguments = (side, theirs, progress_delay_us, poll_s, dict(environment or {}))
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._target, self._initiator = self._connections
        self._shape: Shape | None = None
        self._number = 0

    def write(self, shape: Shape) -> Written:
        """Write once.

        Raises:
            WrongBytesError: the target has not got what was written.
        """
        if shape != self._shape:
            self._prepare(shape)
        self._number += 1
        _ask(self._initiator, "fill", self._number)
        self._target.send(("check", self._number))
        written = Written(*_ask(self._initiator, "write", self._number))
        wrong = _answer(self._target)
        if wrong:
            raise WrongBytesError(f"{wrong} of {written.bytes} bytes are not what was written")
        assert written.descriptors == shape.descriptors, "NIXL merged what was to be scattered"
        return written

    def _prepare(self, shape: Shape) -> None:
        """Allocate and register memory for writes of this shape, and write once, as the first is slow."""
        _ask(self._initiator, "prepare", shape, *_ask(self._target, "prepare", shape))
        self._shape = shape
        self.write(shape)

    def __enter__(self) -> Self:
        """Wait until both processes serve."""
        for connection in self._connections:
            _answer(connection, START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _ask(connection: Connection, request: str, *arguments: Any) -> Any:
    connection.send((request, *arguments))
    return _answer(connection)


def _answer(connection: Connection, timeout_s: float = TRANSFER_TIMEOUT_S) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"a raw NIXL process did not answer within {timeout_s:g} s")
    return connection.recv()


def serve(
    side: type[Target | Initiator],
    connection: Connection,
    progress_delay_us: int | None,
    poll_s: float,
    environment: Mapping[str, str],
) -> None:
    """Run one side, in a process of its own, until its connection is closed."""
    os.environ.update(environment)
    os.dup2(2, 1)  # NIXL logs to stdout, where the figures go
    from vllm.distributed.nixl_utils import nixl_agent_config

    from kvtop.connector.upstream import open_nixl_agent

    config = nixl_agent_config(num_threads=4, capture_telemetry=True)  # as upstream's worker has it
    served = side(open_nixl_agent(side.__name__, config, progress_delay_us), poll_s)
    connection.send("ready")
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(served, name)(*arguments))


class _Side:
    """One agent and its memory."""

    def __init__(self, agent: Any, poll_s: float) -> None:
        self.agent, self.poll_s = agent, poll_s
        self._registered: Any = None

    def allocate(self, shape: Shape) -> list[tuple[int, int, int]]:
        """Allocate and register memory; return (address, bytes, device) of each slot."""
        import numpy as np

        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
        self.shape = shape
        self.memory: Any = np.empty((shape.slots, shape.bytes_each // WORD), np.uint64)
        self.memory[:] = 0  # or each page's first write would have the kernel make it
        start = self.memory.ctypes.data
        regions = self.agent.get_reg_descs([(start, self.memory.nbytes, 0, "")], "DRAM")
        self._registered = self.agent.register_memory(regions)
        return [(start + slot * shape.bytes_each, shape.bytes_each, 0) for slot in range(shape.slots)]

    def pattern(self, number: int) -> Any:
        """Return what a write carries, by descriptor and word; each write carries something else."""
        import numpy as np

        count, size = self.shape.descriptors, self.shape.bytes_each // WORD
        words: Any = np.arange(count * size, dtype=np.uint64).reshape(count, size)
        return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)


class Target(_Side):
    """The side that is written to."""

    def prepare(self, shape: Shape) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Return the agent's metadata and its slots."""
        slots = self.allocate(shape)
        return self.agent.get_agent_metadata(), slots

    def check(self, number: int) -> int:
        """Wait for the notification; return how many bytes are wrong, those between the slots included."""
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        while not any(NOTIFICATION in some for some in self.agent.get_new_notifs().values()):
            if time.monotonic() > deadline:
                raise TimeoutError("the target got no notification")
            time.sleep(self.poll_s)
        written = self.memory[self.shape.choose(f"target {number}")]
        return WORD * int((written != self.pattern(number)).sum() + (self.memory[1::2] != 0).sum())


class Initiator(_Side):
    """The side that writes."""

    def prepare(self, shape: Shape, metadata: bytes, remote: list[tuple[int, int, int]]) -> None:
        """Meet the target, anew if its memory changed, and prepare all slots of both."""
        local = self.allocate(shape)
        peer = self.agent.add_remote_agent(metadata)
        self._local, self._remote = (
            self.agent.prep_xfer_dlist(where, self.agent.get_xfer_descs(slots, "DRAM"))
            for where, slots in (("NIXL_INIT_AGENT", local), (peer, remote))
        )

    def fill(self, number: int) -> None:
        """Put into the memory what is to be written."""
        self.memory[self.shape.choose(f"initiator {number}")] = self.pattern(number)

    def write(self, number: int) -> tuple[int, int, float, float]:
        """Write, and return NIXL's figures."""
        ours, theirs = (self.shape.choose(f"{side} {number}") for side in ("initiator", "target"))
        handle = self.agent.make_prepped_xfer(
            "WRITE", self._local, ours, self._remote, theirs, notif_msg=NOTIFICATION
        )
        state = self.agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL could not write")
            if self.poll_s:
                time.sleep(self.poll_s)
            state = self.agent.check_xfer_state(handle)
        figures = self.agent.get_xfer_telemetry(handle)
        self.agent.release_xfer_handle(handle)
        return figures.totalBytes, figures.descCount, float(figures.postDuration), float(figures.xferDuration)
