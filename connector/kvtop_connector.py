"""The connector that vLLM loads: upstream's push and pull connectors side by side, one chosen per request.

A stock peer works with it, since each half handshakes in its own mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtop.connector.config import read_settings
from kvtop.connector.scheduler_side import SchedulerSide
from kvtop.connector.telemetry import telemetry_for
from kvtop.connector.upstream import KVConnectorRole
from kvtop.connector.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KvtopConnector(SchedulerSide, WorkerSide):
    """vLLM's `kv_connector`; load it with `"kv_connector_module_path": "kvtop.connector"`."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        """Build both halves for one role.

        Raises:
            SettingError: a `kvtop_*` key of `kv_connector_extra_config` is unknown or impossible.
            ValueError: decode context parallelism, which upstream's push cannot serve.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError(
                "KvtopConnector does not support decode_context_parallel_size > 1: vLLM's push half cannot"
            )
        self.settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.telemetry = telemetry_for(vllm_config, self.settings)
        if role == KVConnectorRole.SCHEDULER:
            self.build_scheduler(vllm_config, kv_cache_config, self.settings)
        else:
            self.build_worker(vllm_config, kv_cache_config, self.settings)
        self.halves = {"push": self.push, "pull": self.pull}

    def get_kv_connector_stats(self) -> Any:
        """Return both halves' transfer statistics as one, or None where there is nothing new."""
        if self.role == KVConnectorRole.SCHEDULER:
            return None
        push, pull = (half.get_kv_connector_stats() for half in self.halves.values())
        return push.aggregate(pull) if push and pull else push or pull

    def shutdown(self) -> None:
        """Stop both halves, and say so to the agent."""
        for half in self.halves.values():
            half.shutdown()
        self.telemetry.close()
