"""Everything vLLM- or NIXL-internal that kvtop touches, in one place.

kvtop's connector is built on upstream's own push and pull connectors and hooks into methods that vLLM does
not promise to keep. Each of them is imported here and listed in `kvtop.connector.relied_on`, which the
drift test compares with the source of the installed vLLM and of the next release.

Read in vLLM 0.32.0 and 0.33.0 and NIXL 1.5.1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from vllm import __version__ as VLLM_VERSION
from vllm import envs
from vllm.distributed import nixl_utils
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    PUSH_REG_NOTIF_PREFIX,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id, zmq_ctx
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import make_zmq_path
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.request import RequestStatus

__all__ = [
    "GET_META_MSG",
    "HEARTBEAT_PREFIX",
    "PUSH_REG_NOTIF_PREFIX",
    "VLLM_VERSION",
    "EngineCoreLoop",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "NixlAgentMetadata",
    "NixlBaseConnector",
    "NixlHandshakePayload",
    "NixlPullConnector",
    "NixlPullConnectorScheduler",
    "NixlPullConnectorWorker",
    "NixlPushConnector",
    "NixlPushConnectorScheduler",
    "NixlPushConnectorWorker",
    "StatLoggerBase",
    "affinity_kept",
    "finished_normally",
    "get_base_request_id",
    "init_logger",
    "make_zmq_path",
    "nixl_agents_from",
    "on_cpu",
    "open_nixl_agent",
    "side_channel",
    "zmq_ctx",
]

HEARTBEAT_PREFIX: Final = b"HB:"
"""How a lease-renewal notification begins (`base_worker._send_heartbeats`)."""
SCATTER_GATHER: Final = "NIXL_UCX_SGL_ENABLE"
"""Read when NIXL creates an agent's UCX backend (`nixlUcxEngine`, src/plugins/ucx/ucx_backend.cpp); off by
default there. It is for writes only: https://github.com/ai-dynamo/nixl/pull/1835."""


class EngineCoreLoop:
    """The loop of the engine core that is under construction. Find it while its scheduler is being built.

    An engine core without work waits at its input queue; vLLM itself puts a wake-up there when it is to shut
    down (`engine/core.py`). Whoever has asked for a step must have `has_pending_push_work` say so. Outside an
    engine-core process (vLLM's in-process `LLM`) nobody waits, and waking does nothing.
    """

    def __init__(self) -> None:
        self._core: EngineCoreProc | None = None
        frame: FrameType | None = sys._getframe()
        while frame is not None and self._core is None:
            core = frame.f_locals.get("self")
            self._core = core if isinstance(core, EngineCoreProc) else None
            frame = frame.f_back

    def wake(self) -> None:
        """Have an idle engine look for work."""
        if self._core is not None:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def rest(self, timeout_s: float) -> None:
        """Wait until something comes in, at most so long, unless a request is under way. On its thread."""
        core = self._core
        if (
            core is None
            or core.engines_running
            or core.batch_queue
            or core.scheduler.has_unfinished_requests()
        ):
            return
        with core.input_queue.not_empty:
            if not core.input_queue.queue:
                core.input_queue.not_empty.wait(timeout_s)


def finished_normally(request: Any) -> bool:
    """Whether a finished request computed all that it was to compute: then P has KV to give."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def on_cpu() -> bool:
    """Whether this engine runs vLLM's CPU build."""
    return bool(current_platform.device_type == "cpu")


def side_channel() -> tuple[str, int]:
    """Host and first port on which upstream's NIXL handshake listens."""
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, int(envs.VLLM_NIXL_SIDE_CHANNEL_PORT)


def open_nixl_agent(
    name: str, config: Any, progress_delay_us: int | None, *, scatter_gather: bool = False
) -> Any:
    """Create a NIXL agent as vLLM does, but for two settings that NIXL offers no argument for.

    Args:
        name: the agent's name.
        config: NIXL's `nixl_agent_config`.
        progress_delay_us: how long its progress thread sleeps between polls; None keeps upstream's setting.
        scatter_gather: whether writes hand UCX all their descriptors at once, unless the environment says.
    """
    with _variable(SCATTER_GATHER, "y" if scatter_gather else None):
        return _open_with_delay(name, config, progress_delay_us)


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """While in force, an environment variable has this value, unless it is set or the value is None."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _open_with_delay(name: str, config: Any, progress_delay_us: int | None) -> Any:
    """Create a NIXL agent whose progress thread sleeps `progress_delay_us` between polls.

    NIXL 1.5.1's Python API fixes `pthrDelay = 0` in `nixl_agent.__init__`, which makes the thread spin a
    whole core; any positive value makes it sleep between events. None keeps upstream's setting.
    """
    make_agent = nixl_utils.NixlWrapper
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
    """While in force, workers under construction get their NIXL agent from `factory(name, config)`."""
    upstream_class = base_worker.NixlWrapper
    base_worker.NixlWrapper = factory
    try:
        yield
    finally:
        base_worker.NixlWrapper = upstream_class


@contextmanager
def affinity_kept() -> Iterator[None]:
    """Undo what happens in here to the processors that this thread may run on.

    On CPU `base_worker.__init__` moves the thread that builds it to the last core of each NUMA node, to keep
    transfers off the cores that compute. That thread is the engine's own, which computes too: all engines and
    ranks of a machine would share one core, and starve each other (measured: a decode engine stood still for
    6 s while two ranks of a prefill engine polled). Transfers have a thread of their own here.
    """
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
