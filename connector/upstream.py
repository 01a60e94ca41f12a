"""Everything vLLM- or NIXL-internal that kvtop touches, in one place.

kvtop's connector is built on upstream's own push and pull connectors and hooks into methods that vLLM does
not promise to keep. Each of them is imported here and listed in `RELIED_ON`, and `tests/unit/connector`
checks that list against the installed vLLM and against the source of the next release, so that a vLLM
that moves one of them fails a test with its name instead of failing an engine.

Read in vLLM 0.32.0 and 0.33.0 and NIXL 1.5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from vllm import __version__ as VLLM_VERSION
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

__all__ = [
    "HEARTBEAT_PREFIX",
    "PUSH_REG_NOTIF_PREFIX",
    "RELIED_ON",
    "VLLM_VERSION",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "NixlBaseConnector",
    "NixlPullConnector",
    "NixlPullConnectorScheduler",
    "NixlPullConnectorWorker",
    "NixlPushConnector",
    "NixlPushConnectorScheduler",
    "NixlPushConnectorWorker",
    "StatLoggerBase",
    "init_logger",
    "nixl_agents_from",
    "on_cpu",
    "open_nixl_agent",
    "side_channel",
]

HEARTBEAT_PREFIX: Final = b"HB:"
"""How a lease-renewal notification begins (`base_worker._send_heartbeats`)."""


def on_cpu() -> bool:
    """Whether this engine runs vLLM's CPU build."""
    return bool(current_platform.device_type == "cpu")


def side_channel() -> tuple[str, int]:
    """Host and first port on which upstream's NIXL handshake listens."""
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, int(envs.VLLM_NIXL_SIDE_CHANNEL_PORT)


def open_nixl_agent(name: str, config: Any, progress_delay_us: int | None) -> Any:
    """Create a NIXL agent whose progress thread sleeps `progress_delay_us` between polls.

    NIXL 1.5.1's Python API fixes `pthrDelay = 0` in `nixl_agent.__init__`, which makes the thread spin a whole
    core; any positive value makes it sleep between events. None keeps upstream's setting.
    """
    make_agent = base_worker.NixlWrapper
    if progress_delay_us is None:
        return make_agent(name, config)
    from nixl import _api, _bindings  # noqa: PLC0415 - only where NIXL is about to be used

    upstream_config = _bindings.nixlAgentConfig

    class SleepingConfig(upstream_config):  # type: ignore[misc, valid-type]
        """The agent's settings, deaf to the API's fixed delay of 0."""

        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, progress_delay_us if key == "pthrDelay" else value)

    bindings = _api.nixlBind
    bindings.nixlAgentConfig = SleepingConfig
    try:
        return make_agent(name, config)
    finally:
        bindings.nixlAgentConfig = upstream_config


@contextmanager
def nixl_agents_from(factory: Callable[[str, Any], Any]) -> Iterator[None]:
    """While in force, workers that are being constructed get their NIXL agent from `factory(name, config)`."""
    upstream_class = base_worker.NixlWrapper
    base_worker.NixlWrapper = factory
    try:
        yield
    finally:
        base_worker.NixlWrapper = upstream_class


_NIXL: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

RELIED_ON: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    f"{_NIXL}.base_worker:NixlBaseConnectorWorker": {
        "__init__": ("vllm_config", "engine_id", "kv_cache_config"),
        "_pop_done_transfers": ("transfers",),
        "_reap_expired_send_leases": ("done_sending",),
        "_handle_heartbeat": ("payload",),
        "_log_failure": ("failure_type", "req_id", "msg", "error", "meta"),
        "_ensure_handshake": ("engine_id", "host", "port", "tp_size"),
        "get_transfer_results": (),
        "shutdown": (),
    },
    f"{_NIXL}.push_worker:NixlPushConnectorWorker": {
        "start_load_kv": ("metadata",),
        "_do_send_reg_notif": ("req_id", "reg_data"),
        "_do_start_push_kv": ("request_id", "local_block_ids", "registration_data"),
        "_xfer_blocks_for_req": ("req_id", "meta"),
        "_push_writer_loop": (),
        "_get_new_notifs": (),
        "get_transfer_results": (),
    },
    f"{_NIXL}.pull_worker:NixlPullConnectorWorker": {
        "start_load_kv": ("metadata",),
        "_read_blocks_for_req": ("req_id", "meta"),
        "_get_new_notifs": (),
    },
    f"{_NIXL}.base_scheduler:NixlBaseConnectorScheduler": {
        "__init__": ("vllm_config", "engine_id", "kv_cache_config"),
        "set_xfer_handshake_metadata": ("metadata",),
        "build_connector_meta": ("scheduler_output",),
        "update_connector_output": ("connector_output",),
        "on_new_request": ("request",),
        "has_pending_push_work": (),
        "shutdown": (),
    },
    f"{_NIXL}.connector:NixlBaseConnector": {
        "__init__": ("vllm_config", "role", "kv_cache_config"),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "request_finished": ("request", "block_ids"),
        "request_finished_all_groups": ("request", "block_ids"),
        "set_xfer_handshake_metadata_pp_aware": ("metadata",),
        "get_transfer_results": ("finished_req_ids",),
        "get_handshake_metadata": (),
        "get_kv_connector_stats": (),
        "get_block_ids_with_load_errors": (),
    },
    f"{_NIXL}.stats:NixlKVConnectorStats": {
        "aggregate": ("other",),
        "record_transfer": ("res",),
    },
    "vllm.v1.metrics.loggers:StatLoggerBase": {
        "__init__": ("vllm_config", "engine_index"),
        "record": ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "log_engine_initialized": (),
    },
}
"""`module:class` to methods to the parameters (after self) that kvtop names, passes or overrides."""

RELIED_ON_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_NIXL}.base_worker": (
        "NixlWrapper",
        "nixl_wrapper",
        "_handshake_initiation_executor",
        "_remote_agents",
        "_recving_metadata",
        "_recving_transfers",
        "_reqs_to_send",
        "_reqs_to_process",
        "_recv_failures",
        "world_size",
        "tp_rank",
        "xfer_handshake_metadata",
    ),
    f"{_NIXL}.push_worker": (
        "_sending_transfers",
        "_sending_transfers_lock",
        "_send_failures",
        "_finished_blocks_inbox",
        "_reg_send_inbox",
        "_push_writer_wake",
        "push_registrations",
        "push_finished_blocks",
    ),
    f"{_NIXL}.base_scheduler": ("side_channel_port", "side_channel_host", "_kv_lease_duration"),
    f"{_NIXL}.metadata": ("PUSH_REG_NOTIF_PREFIX", "push_registrations", "push_finished_blocks"),
    "vllm.v1.metrics.stats": (
        "time_to_first_tokens_iter",
        "inter_token_latencies_iter",
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "kv_cache_usage",
    ),
}
"""Module to attributes and names that kvtop reads in it or in its instances."""
