"""A connector for engines with tensor parallelism on few cores, one rank of which can be made to fail.

vLLM loads it through `kv_connector_module_path`; it is never part of the product. Ranks that wait for each
other yield their core in a loop, which starves whoever shares it: so P computes on one core and D on another.
While the file that KVTOP_TEST_DAMAGE_WHILE names exists, posting raises on the second rank of P, or where P
has one, for each second write.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtop.connector import KvtopConnector
from tests.support.corrupting import DAMAGE_WHILE


class TwoRanksConnector(KvtopConnector):
    """Like `KvtopConnector`, but for where it runs, and for a rank that fails on demand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        produces = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        os.sched_setaffinity(0, {cores[0] if produces else cores[-1]})
        super().__init__(vllm_config, role, kv_cache_config)
        worker = self.push.connector_worker
        if worker is not None and produces:
            numbers = itertools.repeat(worker.tp_rank) if worker.world_size > 1 else itertools.count()
            _fail_on_demand(worker.nixl_wrapper, Path(os.environ[DAMAGE_WHILE]), numbers)


def _fail_on_demand(agent: Any, fail_while: Path, numbers: Iterator[int]) -> None:
    make = agent.make_prepped_xfer

    def make_or_fail(*args: Any, **kwargs: Any) -> Any:
        if fail_while.exists() and next(numbers) % 2:
            raise RuntimeError("made to fail on this rank")
        return make(*args, **kwargs)

    agent.make_prepped_xfer = make_or_fail
