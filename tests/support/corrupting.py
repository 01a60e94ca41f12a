"""A connector that damages received KV on purpose: the control for every comparison of outputs.

vLLM loads it through `kv_connector_module_path`; it is never part of the product. While the file that
KVTOP_TEST_DAMAGE_WHILE names exists, the first KV block of each request that D received is zeroed in all
layers before the engine may compute with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Final

from kvtop.connector import KvtopConnector

DAMAGE_WHILE: Final = "KVTOP_TEST_DAMAGE_WHILE"


class CorruptingConnector(KvtopConnector):
    """Like `KvtopConnector`, but for the damage. Needs scheduler and worker in one process."""

    first_blocks: ClassVar[dict[str, int]] = {}
    """Each receiving request's first block on D, from the scheduler's side to the worker's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.damage_while = Path(os.environ[DAMAGE_WHILE])
        self.blocks_in_cache = kv_cache_config.num_blocks
        self.caches: list[Any] = []

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.first_blocks[request.request_id] = blocks.get_block_ids()[0][0]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = list(kv_caches.values())
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            block = self.first_blocks.pop(request_id, None)
            if block is not None and self.damage_while.exists():
                for cache in self.caches:
                    axis = list(cache.shape).index(self.blocks_in_cache)
                    cache.select(axis, block).zero_()
        return results
