"""What can be known of a vLLM or an SGLang server from one of its metrics texts.

Names and meanings are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`, `nixl/stats.py` of its NIXL
connector) and of SGLang (`srt/observability/metrics_collector.py`). What a server does not publish is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvtop.agents.events import Role
from kvtop.agents.facts import KvCounters
from kvtop.agents.stock.exposition import Cumulative, Figures, Malformed, mean

MIB: Final = 1 << 20
_VLLM_NIXL: Final = "vllm:nixl_"
_SGLANG_QUEUES: Final = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
_SGLANG_ROLES: Final[dict[str, Role]] = {"prefill": "prefill", "decode": "decode", "unified": "both"}
_RUNNING: Final = {"vLLM": "vllm:num_requests_running", "SGLang": "sglang:num_running_reqs"}
WANTED: Final = frozenset(
    (
        *_RUNNING.values(),
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:num_requests_kv_fetch_by_stage",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        *(_VLLM_NIXL + each for each in ("xfer_time_seconds", "post_time_seconds", "bytes_transferred")),
        *(_VLLM_NIXL + each for each in ("num_descriptors", "num_failed_transfers")),
        *(_VLLM_NIXL + each for each in ("num_failed_notifications", "num_kv_expired_reqs")),
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:time_to_first_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:kv_transfer_total_mb",
        "sglang:num_transfer_failed_reqs",
        "sglang:num_bootstrap_failed_reqs",
        *(f"sglang:num_{each}_queue_reqs" for each in _SGLANG_QUEUES),
    )
)


@dataclass(frozen=True)
class Reading:
    """One server at one moment."""

    software: str
    model: str = ""
    role: Role | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    queues: dict[str, int] = field(default_factory=dict)
    ttft: Cumulative | None = None
    itl: Cumulative | None = None
    counters: KvCounters | None = None


def read(text: str) -> Reading:
    """Understand a metrics text.

    Raises:
        Malformed: it is no such text, or no vLLM's and no SGLang's.
    """
    figures = Figures(text, WANTED)
    if figures.series(_RUNNING["vLLM"]):
        return _vllm(figures)
    if figures.series(_RUNNING["SGLang"]):
        return _sglang(figures)
    raise Malformed("its metrics are neither vLLM's nor SGLang's (SGLang has them with --enable-metrics)")


def _vllm(figures: Figures) -> Reading:
    running = _RUNNING["vLLM"]
    waiting = figures.by_label("vllm:num_requests_waiting_by_reason", "reason")
    fetching = figures.by_label("vllm:num_requests_kv_fetch_by_stage", "stage")
    return Reading(
        software="vLLM",
        model=figures.label("model_name", [running]),
        running=figures.count(running),
        waiting=figures.count("vllm:num_requests_waiting"),
        kv_usage=figures.once("vllm:kv_cache_usage_perc", mean),
        queues={**waiting, **fetching},
        ttft=figures.histogram("vllm:time_to_first_token_seconds"),
        itl=figures.histogram("vllm:inter_token_latency_seconds"),
        counters=_nixl(figures),
    )


def _nixl(figures: Figures) -> KvCounters | None:
    """Return the NIXL connector's counters; None where the server runs another connector, or none."""
    if not figures.series(f"{_VLLM_NIXL}bytes_transferred_count"):
        return None
    return KvCounters(
        transfers=figures.count(f"{_VLLM_NIXL}bytes_transferred_count"),
        bytes=figures.count(f"{_VLLM_NIXL}bytes_transferred_sum"),
        descriptors=figures.count(f"{_VLLM_NIXL}num_descriptors_sum"),
        post_s=figures.total(f"{_VLLM_NIXL}post_time_seconds_sum"),
        wire_s=figures.total(f"{_VLLM_NIXL}xfer_time_seconds_sum"),
        failed=figures.count(f"{_VLLM_NIXL}num_failed_transfers_total"),
        failed_notifications=figures.count(f"{_VLLM_NIXL}num_failed_notifications_total"),
        expired=figures.count(f"{_VLLM_NIXL}num_kv_expired_reqs_total"),
    )


def _sglang(figures: Figures) -> Reading:
    running = _RUNNING["SGLang"]
    role = _SGLANG_ROLES.get(figures.label("engine_type", [running]))
    depths = {each: figures.once(f"sglang:num_{each}_queue_reqs") for each in _SGLANG_QUEUES}
    ours = {each for each in _SGLANG_QUEUES if role == "both" or role is None or each.startswith(role)}
    return Reading(
        software="SGLang",
        model=figures.label("model_name", [running]),
        role=role,
        running=_whole(figures.once(running)),
        waiting=_whole(figures.once("sglang:num_queue_reqs")),
        kv_usage=figures.once("sglang:token_usage", mean),
        queues={each: round(depth) for each, depth in depths.items() if depth is not None and each in ours},
        ttft=figures.histogram("sglang:time_to_first_token_seconds"),
        itl=figures.histogram("sglang:inter_token_latency_seconds"),
        counters=_sglang_counters(figures),
    )


def _sglang_counters(figures: Figures) -> KvCounters | None:
    """Return what a prefill server counts of its transfers, and either side of failures.

    Its transfer times begin when a request is queued for it, so they are no time on the wire.
    """
    transfers = figures.count("sglang:kv_transfer_total_mb_count")
    mib = figures.total("sglang:kv_transfer_total_mb_sum")
    names = ("num_transfer_failed_reqs", "num_bootstrap_failed_reqs")
    failed = [value for each in names if (value := figures.once(f"sglang:{each}_total")) is not None]
    if transfers is None and not failed:
        return None
    return KvCounters(
        transfers=transfers,
        bytes=None if mib is None else round(mib * MIB),
        failed=round(sum(failed)) if failed else None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
