"""What an agent tells of what lies around the KV transfers: the node, its processes, and what others count.

Values of `kvtop.agents.model`, under its rules: stamps ending in `_ns` are the node's CLOCK_MONOTONIC unless
they say otherwise, and None means unknown.
"""

from __future__ import annotations

import msgspec

from kvtop.agents.events import Process


class Buckets(msgspec.Struct, frozen=True):
    """Durations in seconds, as counts in a server's own histogram buckets.

    All that is known of a duration is its bucket: `counts[i]` of them lie in
    (`bounds_s[i-1]`, `bounds_s[i]`], the last of `counts` above all bounds.
    """

    bounds_s: list[float] = []
    counts: list[float] = []
    count: int = 0
    sum_s: float = 0.0


class BucketedLatency(msgspec.Struct, frozen=True):
    """TTFT and ITL of an observed server over the last `window_s`, as exact as its buckets are narrow."""

    window_s: float
    ttft: Buckets | None
    itl: Buckets | None


class KvCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What an observed server says that it counted of KV transfers since it started. None: it does not say.

    Each rank's transfer counts, on the side that reads or writes.
    """

    transfers: int | None = None
    bytes: int | None = None
    descriptors: int | None = None
    post_s: float | None = None
    wire_s: float | None = None
    """Sums of NIXL's post and transfer durations."""
    failed: int | None = None
    failed_notifications: int | None = None
    expired: int | None = None


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process as its kernel counts it. None: it is gone, or cannot be read from here."""

    pid: int
    process: Process
    rank: int = 0
    status: str | None = None
    """psutil's word: `running`, `sleeping`, `disk-sleep`, `stopped`, `tracing-stop`, `zombie`…"""
    cpu_percent: float | None = None
    """Of one core, since the sample before."""
    rss_bytes: int | None = None
    threads: int | None = None
    open_files: int | None = None
    """File descriptors: files, sockets, devices."""
    open_files_limit: int | None = None
    locked_memory_limit_bytes: int | None = None
    """How much memory it may lock, which registering KV memory for RDMA needs; -1 for as much as it likes."""


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How the process that took its instance along ended, as far as that can be known."""

    process: str
    """For people: `engine-core (pid 12)`."""
    pid: int
    at_ns: int
    """When the kernel said that it ended; when its connection ended, where the kernel was not asked."""
    in_order: bool
    """It had said that it stops."""
    signal: str | None = None
    """What killed it, e.g. `SIGKILL`."""
    exit_code: int | None = None
    core_dumped: bool | None = None
    oom_kills: int | None = None
    """Processes that the kernel killed for lack of memory in its memory cgroup, in its last 5 to 10 s; where
    there is no such count, on the node. None: neither can be read."""
    log_lines: list[str] = []
    """vLLM's own last log lines, where its output goes to a file that the agent may read."""
    log_note: str = ""
    """Why there are none."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The node under the agent, as its kernel counts it. None: cannot be read."""

    sampled_ns: int
    booted_wall_ns: int | None = None
    """Unix time, ns."""
    uptime_s: float | None = None
    cores: int | None = None
    cpu_percent: float | None = None
    """Mean over all cores since the sample before."""
    busiest_core_percent: float | None = None
    busy_cores: int | None = None
    """How many cores were busy for 90 % of that time or more."""
    load_1m: float | None = None
    load_5m: float | None = None
    load_15m: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Of the file system that holds the runtime folder, with the audit log."""
