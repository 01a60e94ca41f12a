"""A stock vLLM pair, without kvtop's connector, is shown through its metrics, and as no more than that."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from kvtop.agents.model import Instance
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.stock.window import quantile_bound
from tests.support.agent import await_snapshot, running_agent, runtime_folder
from tests.support.pair import RunningPair, complete_all, prompts

pytestmark = pytest.mark.vllm

REQUESTS = 12


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


@pytest.mark.parametrize("pair", ["stock-push"], indirect=True)
def test_a_stock_pair_is_observed(pair: RunningPair, paths: RuntimePaths) -> None:
    prefill, decode = (
        f"{pair.pair.prefill.url},role=prefill,name=p",
        f"{pair.pair.decode.url},role=decode,name=d",
    )
    with running_agent(paths, "--observe", prefill, "--observe", decode):
        first = await_snapshot(
            paths,
            lambda seen: (
                [each.state for each in seen.instances] == ["serving", "serving"]
                and all(each.latency_buckets for each in seen.instances)
            ),
            "both servers to have answered twice",
        )
        asked = prompts(REQUESTS, seed=22)
        complete_all(pair.url, asked, in_flight=4)
        before = [each.kv_counters.transfers or 0 for each in first.instances if each.kv_counters]

        def tokens(instance: Instance) -> int:
            found = instance.latency_buckets
            return found.itl.count if found and found.itl else 0

        def transfers(instance: Instance) -> int:
            return instance.kv_counters.transfers or 0 if instance.kv_counters else 0

        expected = sum(prompt.max_tokens - 1 for prompt in asked)
        seen = await_snapshot(
            paths,
            lambda seen: (
                tokens(seen.instances[1]) >= expected
                and seen.instances[1].running == 0
                and transfers(seen.instances[0]) >= before[0] + REQUESTS
            ),
            "all tokens and transfers to be observed",
        )

    p, d = seen.instances
    assert [each.observed for each in (p, d)] == ["vLLM /metrics"] * 2
    assert [(each.name, each.role, each.orders, each.mode) for each in (p, d)] == [
        ("p", "prefill", [], None),
        ("d", "decode", [], None),
    ]
    assert p.kv_counters is not None
    assert transfers(p) - before[0] == REQUESTS
    assert transfers(d) == before[1]  # what P pushes counts on P
    assert p.kv_counters.bytes == pair.nixl_counters().bytes
    assert p.kv_counters.failed == pair.nixl_counters().failed
    assert (p.kv_counters.post_s or 0) > 0
    assert (p.kv_counters.wire_s or 0) > 0
    assert d.latency_buckets is not None
    assert d.latency_buckets.ttft is not None
    assert d.latency_buckets.ttft.count == REQUESTS
    assert tokens(d) == expected
    assert 0 < (quantile_bound(d.latency_buckets.ttft, 0.5) or 0) < math.inf
    assert d.latency is None
    assert (d.running, d.waiting) == (0, 0)
    assert d.kv_usage is not None
    assert d.transfers_done is None
