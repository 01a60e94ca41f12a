"""The list of vLLM's internals that `kvtop.connector` uses or overrides.

It is data, apart from `upstream.py`, so that it can be compared with a vLLM that is not installed: a
release that moves one of these fails a test with the name of what moved, instead of failing an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NIXL: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

RELIED_ON: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    f"{_NIXL}.base_worker:NixlBaseConnectorWorker": {
        "__init__": ("vllm_config", "engine_id", "kv_cache_config"),
        "_pop_done_transfers": ("transfers",),
        "_reap_expired_send_leases": ("done_sending",),
        "_handle_heartbeat": ("payload",),
        "_send_heartbeats": ("metadata",),
        "_log_failure": ("failure_type", "req_id", "msg", "error", "meta"),
        "_nixl_handshake": (
            "host",
            "port",
            "remote_tp_size",
            "expected_engine_id",
            "remote_dcp_size",
            "remote_pp_size",
            "notif_agents_only",
        ),
        "_ensure_handshake": ("engine_id", "host", "port", "tp_size", "pp_size", "notif_agents_only"),
        "_track_remote_engine_replacement": ("engine_id", "host", "port"),
        "_cleanup_remote_engine": ("engine_id", "log_eviction"),
        "get_transfer_results": (),
        "get_kv_connector_stats": (),
        "shutdown": (),
    },
    f"{_NIXL}.push_worker:NixlPushConnectorWorker": {
        "start_load_kv": ("metadata",),
        "_do_send_reg_notif": ("req_id", "reg_data"),
        "_do_start_push_kv": ("request_id", "local_block_ids", "registration_data"),
        "_xfer_blocks_for_req": ("req_id", "meta"),
        "_push_writer_loop": (),
        "_handle_push_reg_notif": ("notif",),
        "_send_registration_to_p": ("req_id", "reg_data"),
        "_pop_matching_registration": ("request_id",),
        "_pop_matching_finished_blocks": ("request_id",),
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
        "_nixl_handshake_listener": (),
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
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": {
        "bind_gpu_block_pool": ("gpu_block_pool",),
        "build_connector_worker_meta": (),
    },
    "vllm.v1.core.block_pool:BlockPool": {
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
    },
    "vllm.v1.engine.core:EngineCoreProc": {"run_busy_loop": (), "is_running": ()},
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
        "_failed_recv_reqs",
        "_engine_clock_offset",
        "_handshake_futures",
        "_handshake_lock",
        "_lease_extension",
        "_evict_stale_engines",
        "_engine_last_active",
        "record_failed_handshake",
        "handshake_target_ranks",
        "unregister_remote_engine",
        "kv_caches_base_addr",
        "dst_num_blocks",
        "dst_region_group_ids",
        "dst_region_mem_types",
        "dst_region_num_blocks",
        "dst_uses_region_group_mapping",
        "dst_xfer_side_handles",
        "tp_mappings",
        "consumer_notification_counts_by_req",
        "expected_consumer_notifications_by_req",
        "record_kv_expired_req",
        "world_size",
        "tp_rank",
        "xfer_handshake_metadata",
    ),
    f"{_NIXL}.push_worker": (
        "_sending_transfers",
        "_sending_transfers_lock",
        "_send_failures",
        "_finished_blocks_inbox",
        "_deferred_push_inbox",
        "_evict_finished_inbox",
        "_pending_completion_notifs",
        "_pending_d_registrations",
        "_push_finished_blocks",
        "_push_writer_stop",
        "_reg_send_inbox",
        "_push_writer_wake",
        "push_registrations",
        "push_finished_blocks",
    ),
    f"{_NIXL}.base_scheduler": (
        "_reqs_need_recv",
        "_truncate_request_for_prefill",
        "_reqs_not_processed",
        "side_channel_port",
        "side_channel_host",
        "_kv_lease_duration",
    ),
    f"{_NIXL}.utils": ("get_base_request_id", "zmq_ctx"),
    "vllm.v1.engine.core": ("input_queue", "WAKEUP"),
    f"{_NIXL}.metadata": (
        "GET_META_MSG",
        "NixlAgentMetadata",
        "NixlHandshakePayload",
        "PUSH_REG_NOTIF_PREFIX",
        "push_registrations",
        "push_finished_blocks",
    ),
    "vllm.distributed.nixl_utils": ("NixlWrapper",),
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
