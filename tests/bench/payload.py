"""Payload GB/s of kvtop's pushes against raw NIXL with the same descriptors, and what scatter-gather saves.

Against raw NIXL: a real pair pushes the KV of long prompts, one at a time, after its KV cache has been used
enough to be fragmented. After each push, two NIXL agents in processes without an engine write as many bytes
in as many descriptors, scattered over memory as large as the pair's KV cache. Both pairs' agents have the
same settings and the same sleeping progress thread, both look for the completion at the same interval, and
both figures are NIXL's own: payload over the time from the post to the poll that saw the completion. What is
left is what the engines around a transfer cost it: processors and caches that others use too. The pair's
descriptors differ in size, as NIXL merges runs of blocks; the raw ones are all of the pair's mean size.

Scatter-gather: raw NIXL with `NIXL_UCX_SGL_ENABLE=y` against the same without it. Every write's bytes are
checked on arrival. NIXL's own pick on one host is cma, where the post itself copies; tcp is what it picks
between hosts without RDMA.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

from kvtop.agents.model import Transfer
from kvtop.connector.halves import CPU_PROGRESS_DELAY_US
from kvtop.connector.writing import POLL_S
from kvtop.console.demo.load import Prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.processes import Processes
from tests.bench.paired import Ratio, quartiles
from tests.bench.raw_nixl import WORD, RawPair, Shape, Written
from tests.support.pair import RunningPair, complete, complete_all, start_in
from tests.support.waiting import wait_until

ROUNDS = 40
PROMPT_TOKENS = 3000
WEARING = 40
"""Prompts of all lengths that use and fragment the KV cache of the pair, four at a time."""
SEED = 3
TRANSPORTS = {"cma (NIXL's own pick)": {}, "tcp": {"UCX_TLS": "tcp,self"}}
SCATTER_GATHER = {"NIXL_UCX_SGL_ENABLE": "y"}
SHAPES = {Shape(96, 256 << 10): 40, Shape(2_048, 16 << 10): 40, Shape(20_000, 16 << 10): 12}
"""What is written with and without scatter-gather, and how often. The first is what this pair writes for a
prompt of 24 blocks whose blocks lie scattered."""


def measure() -> Iterator[Ratio | str]:
    """Yield ratios by transport: payload GB/s to raw NIXL's, and times with scatter-gather to without."""
    for transport, environment in TRANSPORTS.items():
        with Processes() as processes:
            yield from _against_raw(processes, transport, environment)
    for transport, environment in TRANSPORTS.items():
        yield from _scatter_gather(transport, environment)


def _against_raw(
    processes: Processes, transport: str, environment: Mapping[str, str]
) -> Iterator[Ratio | str]:
    pair = start_in(
        processes,
        "kvtop-small-cache",
        make_model(processes.folder / "model"),
        prefix="",
        settings=environment,
    )
    pushes = Pushes(pair)
    with _raw(environment) as raw, _raw(environment, poll_s=0.0) as eager:
        rounds = []
        for _ in range(ROUNDS):
            push = pushes.next()
            rounds.append((push, raw.write(shape_of(push)), eager.write(shape_of(push))))
    yield f"transfers over {transport}: {fragmentation([push for push, _, _ in rounds])}"
    for polled, column in ((f"every {POLL_S * 1e3:g} ms, as kvtop's", 1), ("without pause", 2)):
        what = (
            f"payload GB/s of kvtop's pushes / raw NIXL polled {polled}, {transport}, "
            f"progress threads sleep {CPU_PROGRESS_DELAY_US / 1e3:g} ms"
        )
        figures = [(gigabytes_per_s(each[0]), gigabytes_per_s(each[column])) for each in rounds]
        yield quartiles(what, figures, unit="GB/s", scale=1)


def _scatter_gather(transport: str, environment: Mapping[str, str]) -> Iterator[Ratio]:
    with _raw({**environment, **SCATTER_GATHER}) as gathering, _raw(environment) as plain:
        for shape, times in SHAPES.items():
            rounds = [_both(number, gathering, plain, shape) for number in range(times)]
            what = (
                f"{shape.descriptors} x {shape.bytes_each >> 10} KiB scattered, {transport}, scatter-gather"
            )
            yield quartiles(f"post time, {what}", [(a.post_us / 1e6, b.post_us / 1e6) for a, b in rounds])
            yield quartiles(f"wire time, {what}", [(a.wire_us / 1e6, b.wire_us / 1e6) for a, b in rounds])


def _both(number: int, one: RawPair, other: RawPair, shape: Shape) -> tuple[Written, Written]:
    """Write with each, swapping who goes first."""
    if number % 2:
        second = other.write(shape)
        return one.write(shape), second
    return one.write(shape), other.write(shape)


def _raw(environment: Mapping[str, str], poll_s: float = POLL_S) -> RawPair:
    return RawPair(progress_delay_us=CPU_PROGRESS_DELAY_US, poll_s=poll_s, environment=environment)


class Pushes:
    """Pushes of long prompts by a pair whose KV cache is worn in."""

    def __init__(self, pair: RunningPair) -> None:
        self._pair = pair
        self._rng = random.Random(SEED)
        self._seen: set[int] = set()
        wearing = [self._prompt(self._rng.randrange(100, PROMPT_TOKENS)) for _ in range(WEARING)]
        complete_all(pair.url, wearing, in_flight=4)
        wait_until(lambda: len(self._done()) == WEARING, "the last push to be reported")
        self._seen.update(self._done())

    def next(self) -> Transfer:
        """Have the next prompt answered, and return its transfer."""
        complete(self._pair.url, self._prompt(PROMPT_TOKENS))
        wait_until(lambda: self._done().keys() - self._seen, "the push to be reported", poll_s=0.05)
        done = self._done()
        (new,) = done.keys() - self._seen
        self._seen.add(new)
        return done[new]

    def _done(self) -> dict[int, Transfer]:
        transfers = self._pair.snapshot().transfers
        return {each.id: each for each in transfers if each.stage == "done" and each.wire_us}

    def _prompt(self, tokens: int) -> Prompt:
        text = " ".join(f"{self._rng.getrandbits(32):x}" for _ in range(tokens // 7 + 1))
        return Prompt(text[:tokens], 1)


def shape_of(push: Transfer) -> Shape:
    """Return as many descriptors of the push's mean size."""
    assert push.bytes, push
    assert push.descriptors, push
    return Shape(push.descriptors, push.bytes // push.descriptors // WORD * WORD)


def gigabytes_per_s(transfer: Transfer | Written) -> float:
    """Return payload over NIXL's transfer time, in 10⁹ bytes per second."""
    assert transfer.bytes, transfer
    assert transfer.wire_us, transfer
    return transfer.bytes / transfer.wire_us / 1e3


def fragmentation(pushes: Sequence[Transfer]) -> str:
    """Say how scattered the pushes' blocks were, and how much of their time went into posting them."""
    per_block = [push.descriptors / push.blocks for push in pushes if push.descriptors and push.blocks]
    posting = [push.post_us / push.wire_us for push in pushes if push.post_us and push.wire_us]
    return (
        f"descriptors per block: median {statistics.median(per_block):.2f} "
        f"({min(per_block):.2f} to {max(per_block):.2f}); "
        f"post over wire time: median {statistics.median(posting):.2f} ({len(pushes)} pushes)"
    )
