"""One agent process: the only one of its runtime folder, from its first socket to its last."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtop.agents.host import sample_host
from kvtop.agents.runtime import RuntimePaths
from kvtop.agents.server import Agent, listen
from kvtop.agents.stock.observer import Observers

logger = logging.getLogger("kvtop.agent")


@dataclass(frozen=True)
class SshOptions:
    """How the embedded SSH server is to listen."""

    host: str
    port: int
    authorized_keys: Path
    host_key: Path


@contextlib.contextmanager
def sole_agent(paths: RuntimePaths) -> Iterator[int | None]:
    """Hold the runtime folder's lock; yield None, or the pid of the agent that holds it."""
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).strip()
            yield int(holder) if holder.isdigit() else 0
            return
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield None
    finally:
        os.close(descriptor)


async def serve(
    agent: Agent,
    paths: RuntimePaths,
    ssh: SshOptions | None,
    exit_when_idle_s: float | None,
    observers: Observers | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until nobody came for long enough; leave no socket behind.

    Raises:
        OSError: a socket cannot be listened on.
        ValueError: the SSH server's keys are missing or unusable.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as ending:
        ending.push_async_callback(agent.commands.close)
        for server in await listen(agent, paths):
            ending.callback(server.close)
        for path in (paths.ingest, paths.view, paths.operate):
            ending.callback(path.unlink, missing_ok=True)
        if ssh is not None:
            from kvtop.agents.ssh_server import serve_ssh  # noqa: PLC0415 - asyncssh only where asked for

            acceptor = await serve_ssh(
                paths,
                host=ssh.host,
                port=ssh.port,
                authorized_keys=ssh.authorized_keys,
                host_key=ssh.host_key,
            )
            ending.callback(acceptor.close)
            logger.info("serving SSH on %s:%d", ssh.host, acceptor.get_port())
        timekeeper = asyncio.create_task(agent.keep_time(exit_when_idle_s, paths.lock.exists))
        timekeeper.add_done_callback(lambda _task: stop.set())
        ending.callback(timekeeper.cancel)
        sampling = asyncio.create_task(sample_host(paths.folder, agent.instances.watched, agent.sampled))
        ending.callback(sampling.cancel)
        if observers is not None:
            agent.instances.observed = observers.freeze
            observing = asyncio.create_task(observers.run())
            ending.callback(observing.cancel)
        logger.info("serving %s", paths.folder)
        await stop.wait()
