"""Stock vLLM and SGLang servers are shown with what their metrics say, labelled, and with nothing made up."""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.agents.facts import Buckets, KvCounters
from kvtop.agents.latency import NS
from kvtop.agents.model import Instance, Snapshot
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.stock.exposition import Cumulative, Malformed
from kvtop.agents.stock.observer import DOWN_AFTER_S, Observed, Target
from kvtop.agents.stock.reading import read
from kvtop.agents.stock.window import HistogramWindow, quantile_bound
from tests.support.acting import AGENT_CLI
from tests.support.agent import agent_log, await_snapshot, hello, reporting, running_agent, runtime_folder
from tests.support.metrics_server import Behaviour, MetricsServer, metrics_server
from tests.support.repository import ROOT, python
from tests.support.waiting import wait_until

TEXTS = ROOT / "tests" / "data" / "metrics"
LABELS = 'engine_type="{role}",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="{rank}"'


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with metrics_server(text("vllm-decode")) as running:
        yield running


def text(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


def agent_command(paths: RuntimePaths, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvtop-agent` to its end."""
    command = [*AGENT_CLI, "--runtime-dir", str(paths.folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def observed(seen: Snapshot) -> Instance:
    (found,) = (each for each in seen.instances if each.observed)
    return found


def test_a_vllm_prefill_server_is_read() -> None:
    reading = read(text("vllm-prefill"))

    assert (reading.software, reading.role) == ("vLLM", None)  # vLLM does not say its role
    assert reading.counters == KvCounters(
        transfers=12,
        bytes=54_525_952,
        descriptors=84,
        post_s=0.107179,
        wire_s=1.0802209999999999,
        failed=0,
        failed_notifications=0,
        expired=0,
    )
    assert (reading.running, reading.waiting) == (0, 0)
    assert reading.queues == {"capacity": 0, "deferred": 0}


def test_a_vllm_decode_server_is_read() -> None:
    reading = read(text("vllm-decode"))

    assert reading.counters is not None
    assert reading.counters.transfers == 0
    assert set(reading.queues) == {
        "capacity",
        "deferred",
        "waiting_to_start",
        "in_progress",
        "completed_waiting",
    }
    assert reading.ttft is not None
    assert reading.itl is not None
    assert reading.itl.counts[-1] > reading.ttft.counts[-1] > 0


def test_data_parallel_engines_are_put_together() -> None:
    reading = read(
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6\n'
    )

    assert (reading.running, reading.model) == (7, "m")
    assert reading.kv_usage == pytest.approx(0.4)
    assert (reading.waiting, reading.ttft, reading.counters) == (None, None, None)


def sglang(role: str, **gauges: float) -> str:
    """The lines of an SGLang server with two tensor-parallel ranks that both publish."""
    lines = []
    for name, value in {"num_running_reqs": 2, "num_queue_reqs": 1, "token_usage": 0.25, **gauges}.items():
        lines.append(f"# TYPE sglang:{name} gauge")
        lines += [
            f"sglang:{name}{{{LABELS.format(role=role, rank=rank)}}} {float(value)}" for rank in range(2)
        ]
    return "\n".join(lines) + "\n"


def test_an_sglang_prefill_server_is_read() -> None:
    labels = LABELS.format(role="prefill", rank=0)
    reading = read(
        sglang(
            "prefill",
            num_prefill_bootstrap_queue_reqs=3,
            num_prefill_inflight_queue_reqs=1,
            num_decode_prealloc_queue_reqs=0,
        )
        + "# TYPE sglang:kv_transfer_total_mb histogram\n"
        f'sglang:kv_transfer_total_mb_bucket{{{labels},le="10.0"}} 4.0\n'
        f'sglang:kv_transfer_total_mb_bucket{{{labels},le="+Inf"}} 5.0\n'
        f"sglang:kv_transfer_total_mb_count{{{labels}}} 5.0\n"
        f"sglang:kv_transfer_total_mb_sum{{{labels}}} 40.5\n"
        "# TYPE sglang:num_transfer_failed_reqs_total counter\n"
        f"sglang:num_transfer_failed_reqs_total{{{labels}}} 2.0\n"
    )

    assert (reading.software, reading.role, reading.model) == ("SGLang", "prefill", "m")
    assert (reading.running, reading.waiting, reading.kv_usage) == (2, 1, 0.25)
    assert reading.queues == {"prefill_bootstrap": 3, "prefill_inflight": 1}
    assert reading.counters == KvCounters(transfers=5, bytes=round(40.5 * (1 << 20)), failed=2)


def test_an_sglang_decode_server_is_read() -> None:
    reading = read(
        sglang("decode", num_decode_prealloc_queue_reqs=4, num_decode_transfer_queue_reqs=2)
        + "# TYPE sglang:time_to_first_token_seconds histogram\n"
        + "".join(
            f'sglang:time_to_first_token_seconds_bucket{{is_streaming="{streaming}",le="{le}"}} {n}\n'
            for streaming in ("true", "false")
            for le, n in (("0.1", 1.0), ("+Inf", 3.0))
        )
        + 'sglang:time_to_first_token_seconds_sum{is_streaming="true",model_name="m"} 0.9\n'
    )

    assert reading.role == "decode"
    assert reading.queues == {"decode_prealloc": 4, "decode_transfer": 2}
    assert reading.ttft == Cumulative((0.1,), (2.0, 6.0), 0.9)
    assert reading.counters is None


def test_shares_by_priority_are_not_added_to_their_total() -> None:
    lines = "# TYPE sglang:num_running_reqs gauge\n" + "".join(
        f'sglang:num_running_reqs{{engine_type="unified",priority="{priority}",tp_rank="0"}} {value}\n'
        for priority, value in (("", 14.0), ("0", 9.0), ("1", 5.0))
    )

    assert read(lines).running == 14


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "neither vLLM's nor SGLang's"),
        ("<html>a web page</html>", "neither vLLM's nor SGLang's"),
        ("# TYPE up gauge\nup 1\n", "neither vLLM's nor SGLang's"),
        ("vllm:num_requests_running{engine=} x\n", "cannot be read"),
        ("vllm:num_requests_running\n", "cannot be read"),
        ("a 1\n" * 30_000, "more than 20000 lines"),
        ('vllm:num_requests_running{engine="0"} NaN\n', "neither vLLM's nor SGLang's"),
    ],
)
def test_a_text_that_is_no_such_servers_is_refused(wrong: str, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        read(wrong)


PARTS = (
    *("vllm:num_requests_running", "_bucket", "# TYPE ", " gauge", " 1", "le="),
    *("{", "}", '"', "=", "\\", "\n"),
)


@given(st.text(max_size=300) | st.lists(st.sampled_from(PARTS)).map("".join))
def test_no_text_does_worse_than_to_be_refused(wrong: str) -> None:
    with contextlib.suppress(Malformed):
        read(wrong)


def test_a_window_holds_what_was_added_within_it() -> None:
    window = HistogramWindow()
    assert window.buckets() is None
    window.add(0, Cumulative((0.1, 0.5), (10, 20, 30), 9.0))
    assert window.buckets() is None
    window.add(2 * NS, Cumulative((0.1, 0.5), (11, 24, 35), 12.0))
    assert window.buckets() == Buckets([0.1, 0.5], [1, 3, 1], 5, 3.0)

    for second in range(4, 70, 2):
        window.add(second * NS, Cumulative((0.1, 0.5), (11, 24, 35), 12.0))

    assert window.buckets() == Buckets([0.1, 0.5], [0, 0, 0], 0, 0.0)


@pytest.mark.parametrize(
    "anew", [Cumulative((0.1, 0.5), (0, 1, 2), 1.0), Cumulative((0.2, 0.5), (90, 91, 92), 99.0)]
)
def test_a_server_that_was_started_anew_is_not_compared_with_its_former_self(anew: Cumulative) -> None:
    window = HistogramWindow()
    window.add(0, Cumulative((0.1, 0.5), (10, 20, 30), 9.0))

    window.add(2 * NS, anew)

    assert window.buckets() is None


def test_a_quantile_of_buckets_is_told_as_the_bound_that_it_is_at_most() -> None:
    of = Buckets([0.1, 0.5], [50, 49, 1], 100, 20.0)

    assert [quantile_bound(of, q) for q in (0.5, 0.99, 1.0)] == [0.1, 0.5, math.inf]


@pytest.mark.parametrize(
    "wrong",
    [
        "10.0.0.7:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://user:secret@host",
        "http://host,role=middle",
        "http://host,colour=blue",
    ],
)
def test_what_cannot_be_observed_is_refused_on_the_command_line(paths: RuntimePaths, wrong: str) -> None:
    ended = agent_command(paths, "run", "--observe", wrong)

    assert ended.returncode == 2
    assert "--observe" in ended.stderr


def test_a_target_names_its_server() -> None:
    assert Target.parse("http://n:1,name=p-0,role=prefill") == Target("http://n:1/metrics", "p-0", "prefill")
    assert Target.parse("https://n/x/metrics").url == "https://n/x/metrics"


def test_a_stock_server_is_shown_labelled_beside_those_that_report(
    paths: RuntimePaths, server: MetricsServer
) -> None:
    with (
        running_agent(paths, "--observe", f"{server.url},role=decode,name=stock"),
        reporting(paths, start_agent=False, hello=hello("ours")),
    ):
        seen = await_snapshot(
            paths,
            lambda seen: len(seen.instances) == 2 and observed(seen).latency_buckets,
            "two readings of the server",
        )
        status = agent_command(paths, "status").stdout

    instance = observed(seen)
    assert (instance.name, instance.role, instance.state) == ("stock", "decode", "serving")
    assert instance.observed == "vLLM /metrics"
    assert (instance.mode, instance.tp_size, instance.transfers_done, instance.latency) == (None,) * 4
    assert (instance.sent_bytes_per_s, instance.received_bytes_per_s, instance.orders) == (None, None, [])
    assert (instance.running, instance.waiting) == (0, 0)
    (line,) = (line for line in status.splitlines() if line.startswith("stock"))
    assert "stock (observed: vLLM /metrics)" in line
    assert next(each for each in seen.instances if each.name == "ours").observed == ""


def test_percentiles_of_a_stock_server_are_told_as_bounds(paths: RuntimePaths, server: MetricsServer) -> None:
    bucket = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="%s",model_name="m"} %d\n'

    def histogram(*counts: int) -> str:
        lines = "".join(bucket % (le, n) for le, n in zip(("0.25", "1.0", "+Inf"), counts, strict=True))
        return (
            '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 1\n'
            f"# TYPE vllm:time_to_first_token_seconds histogram\n{lines}"
        )

    server.text = histogram(0, 0, 0)
    with running_agent(paths, "--observe", server.url):
        await_snapshot(paths, lambda seen: observed(seen).latency_buckets, "two readings")
        server.text = histogram(90, 100, 100)

        wait_until(lambda: "≤ 250 / ≤ 1000" in agent_command(paths, "status").stdout, "the samples")


def test_an_order_to_a_stock_server_is_refused_with_the_reason(
    paths: RuntimePaths, server: MetricsServer
) -> None:
    with running_agent(paths, "--observe", f"{server.url},name=stock"):
        await_snapshot(paths, lambda seen: observed(seen).state == "serving", "an answer")

        ended = agent_command(paths, "drain", "stock", "--yes")

    assert ended.returncode == 1
    assert "stock takes no orders: it is only observed, through vLLM /metrics" in ended.stderr


def test_a_server_that_cannot_be_reached_is_down_with_the_reason_until_it_answers(
    paths: RuntimePaths,
) -> None:
    with metrics_server() as gone:
        url = gone.url
    with running_agent(paths, "--observe", url):
        seen = await_snapshot(paths, lambda seen: observed(seen).state == "down", "it to be missed")

    instance = observed(seen)
    assert f"{url}/metrics: nothing can be reached there" in instance.state_reason
    assert (instance.running, instance.waiting, instance.kv_usage) == (None, None, None)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("hang", "does not answer within 5 s"),
        ("drip", "does not answer within 5 s"),
        ("flood", "its answer has more than"),
        ("fail", "it answers 503"),
    ],
)
def test_a_server_that_misbehaves_keeps_nothing_else_waiting(
    paths: RuntimePaths, server: MetricsServer, behaviour: Behaviour, said: str
) -> None:
    with metrics_server() as bad:
        bad.behaviour = behaviour
        with running_agent(paths, "--observe", f"{bad.url},name=bad", "--observe", f"{server.url},name=good"):
            wait_until(lambda: bad.asked, "it to be asked", timeout_s=30)
            await_snapshot(
                paths,
                lambda seen: {each.name: each.state for each in seen.instances}.get("good") == "serving",
                "the good server",
            )
            asked = server.asked
            seen = await_snapshot(
                paths,
                lambda seen: said in {each.name: each.state_reason for each in seen.instances}["bad"],
                "the reason",
            )

            wait_until(lambda: server.asked > asked, "the good server to be asked again")
            bad.over.set()
        assert "a bug in kvtop" not in agent_log(paths)

    states = {each.name: each.state for each in seen.instances}
    assert states == {"bad": "down", "good": "serving"}


def test_a_server_that_falls_silent_is_stale_and_then_down_and_its_figures_end() -> None:
    server = Observed(Target("http://n/metrics", "n"), 0)
    assert server.freeze().state == "starting"
    server.answered(text("vllm-decode"), 1 * NS)
    assert (server.freeze().state, server.freeze().running) == ("serving", 0)

    server.failed("it hangs", 3 * NS)
    assert (server.freeze().state, server.freeze().state_since_ns) == ("stale", 1 * NS)
    assert server.freeze().running == 0
    assert server.freeze().state_reason == "http://n/metrics: it hangs"

    server.failed("it hangs", 1 * NS + int(DOWN_AFTER_S * NS))
    assert (server.freeze().state, server.freeze().running) == ("down", None)
    assert server.freeze().observed == "vLLM /metrics"

    server.answered(text("vllm-decode"), 60 * NS)
    assert (server.freeze().state, server.freeze().state_reason) == ("serving", "")


def test_an_agent_that_observes_nothing_loads_nothing_for_it() -> None:
    loaded = python(
        "import sys, kvtop.agents.cli, kvtop.agents.process, kvtop.agents.reports; print(*sys.modules)"
    )

    assert {"httpx", "prometheus_client"}.isdisjoint(loaded.split())
