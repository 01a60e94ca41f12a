"""The vLLM stat-logger plugin: exact TTFT and ITL samples and the scheduler's load, from the API server.

vLLM loads it through the entry-point group `vllm.stat_logger_plugins` in every API server on a machine where
kvtop is installed, so it stays inert in instances that do not use kvtop's connector. An exception in `record`
would kill vLLM's output handler: nothing leaves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtop.agents.orders import Order, SetDraining
from kvtop.connector import admission
from kvtop.connector.config import read_settings
from kvtop.connector.telemetry import Telemetry, telemetry_for
from kvtop.connector.upstream import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvtopStatLogger(StatLoggerBase):
    """Feeds one engine's statistics to the node agent."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        """Attach to the agent if this instance uses kvtop's connector; else do nothing, ever."""
        transfer = vllm_config.kv_transfer_config
        self.telemetry = Telemetry(None)
        if transfer is not None and transfer.has_connector("KvtopConnector"):
            settings = read_settings(transfer.kv_connector_extra_config)
            self.telemetry = telemetry_for(vllm_config, settings, "api-server", engine_index)
            self._engine = f"{transfer.engine_id}/{engine_index}"
            admission.set_draining(self._engine, draining=False)  # it counts among those that serve
            self.telemetry.obey(self._obey, lambda: None)

    def _obey(self, order: Order) -> None:
        """Tell the admission middleware, which lives in this process. Runs on the reporter's thread."""
        if isinstance(order, SetDraining):
            admission.set_draining(self._engine, draining=order.draining)
            self.telemetry.answer(order.order_id, ok=True, message=admission.told())

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one engine step's statistics. Runs in vLLM's asyncio output handler."""
        if iteration_stats is not None:
            self.telemetry.latency(
                iteration_stats.time_to_first_tokens_iter, iteration_stats.inter_token_latencies_iter
            )
        if scheduler_stats is not None:
            self.telemetry.load(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )

    def log_engine_initialized(self) -> None:
        """Nothing to say: the agent knows the engine from its hello."""
