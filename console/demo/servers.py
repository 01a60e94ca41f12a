"""How vLLM servers and the router in front of them are started: settings that run on two cores, no GPU."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvtop.console.demo.model import MAX_MODEL_LEN
from kvtop.console.demo.ports import HOST, Ports
from kvtop.console.demo.processes import NotReady, Processes, Running

MODEL_NAME: Final = "tiny"
Role = Literal["prefill", "decode"]
KV_ROLES: Final[Mapping[Role, str]] = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Connector:
    """A vLLM KV connector and its settings."""

    name: str
    """vLLM's `kv_connector`."""
    module_path: str | None = None
    """Where it is imported from; None for one of vLLM's own."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What D does with a request whose KV does not come (vLLM's own default is to fail it)."""

    admission: bool = False
    """Whether the API server refuses new requests while its instance drains."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server that it runs in."""

    def transfer_config(self, role: Role, instance: str) -> str:
        """Return `--kv-transfer-config` for an instance of this role."""
        extra = dict(self.extra)
        config = {"kv_connector": self.name, "kv_role": KV_ROLES[role], "kv_buffer_device": "cpu"}
        config["kv_load_failure_policy"] = self.load_failure_policy
        if self.module_path is not None:
            config["kv_connector_module_path"] = self.module_path
            extra["kvtop_name"] = instance
        return json.dumps({**config, "kv_connector_extra_config": extra})


def kvtop_connector(mode: str) -> Connector:
    """Return kvtop's own connector; requests go `mode`'s way ("push" or "pull")."""
    return Connector("KvtopConnector", "kvtop.connector", {"kvtop_mode": mode}, admission=True)


@dataclass(frozen=True)
class Server:
    """One vLLM server. Without a role it serves alone, with no KV connector."""

    name: str
    port: int
    role: Role | None = None
    side_channel: int = 0

    @property
    def url(self) -> str:
        """Return where it answers."""
        return f"http://{HOST}:{self.port}"


def start_server(
    processes: Processes,
    server: Server,
    model: Path,
    connector: Connector | None = None,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start one vLLM server; with `connector` if it has a role."""
    argv = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host", HOST, "--port", str(server.port), "--uvicorn-log-level", "warning"),
        *("--load-format", "safetensors", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        # By class path: vLLM's CPU platform overrides the plain value "uni". One process fewer, no spinning
        # shared-memory loop and no pinning.
        "--distributed-executor-backend",
        "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    ]
    if server.role is not None and connector is not None:
        argv += ["--kv-transfer-config", connector.transfer_config(server.role, server.name)]
        argv += connector.arguments
        if connector.admission:
            argv += ["--middleware", "kvtop.connector.admission.Admission"]
    return processes.start(server.name, argv, {**_environment(processes.folder, server), **(env or {})})


def _environment(folder: Path, server: Server) -> dict[str, str]:
    """Return variables that keep the server offline, small, and all of its files in `folder`."""
    scratch = folder / "files" / server.name
    scratch.mkdir(parents=True, exist_ok=True)
    return {
        "OMP_NUM_THREADS": "1",
        # Else tensor parallel ranks compile at their first request (20 s), and want a NUMA node each.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(server.side_channel),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch),
        "XDG_CONFIG_HOME": str(scratch),
        "HF_HOME": str(scratch),
    }


def start_router(processes: Processes, name: str, ports: Ports, prefill: Server, decode: Server) -> Running:
    """Start the real vLLM router in front of a pair."""
    return processes.start(
        name,
        [
            *(sys.executable, "-P", "-m", "vllm_router.launch_router"),
            *("--host", HOST, "--port", str(ports.router)),
            *("--prometheus-host", HOST, "--prometheus-port", str(ports.router_metrics)),
            *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"),
            *("--worker-startup-check-interval", "1"),
            *("--prefill", prefill.url, "--decode", decode.url),
        ],
    )


def wait_healthy(
    processes: Processes,
    urls: Mapping[str, str],
    *,
    timeout_s: float,
    on_ready: Callable[[str], None] = lambda name: None,
) -> None:
    """Wait until each named process answers 200 at its URL, telling `on_ready` as each does.

    Raises:
        ProcessFailed: one of them ended.
        NotReady: `timeout_s` passed; the message holds the end of the slowest one's log.
    """
    waiting = dict(urls)
    deadline = time.monotonic() + timeout_s
    while waiting:
        processes.check(*waiting)
        for name in [name for name, url in waiting.items() if answers(url)]:
            del waiting[name]
            on_ready(name)
        if waiting and time.monotonic() > deadline:
            name = next(iter(waiting))
            raise NotReady(
                f"{name} does not answer after {timeout_s:g} s; the end of its log:\n{processes.tail(name)}"
            )
        time.sleep(0.1)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether GET `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
