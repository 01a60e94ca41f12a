"""A bridge between a process's standard streams and one of the agent's sockets.

This is what a console runs over an SSH session where the server forbids forwarding to Unix sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 16


async def bridge(path: Path) -> None:
    """Copy bytes both ways until the agent ends the stream, which it does once its peer asks no more.

    Raises:
        FileNotFoundError, ConnectionRefusedError: no agent listens there.
        PermissionError: this user may not connect.
    """
    loop = asyncio.get_running_loop()
    from_agent, to_agent = await asyncio.open_unix_connection(path)
    from_peer = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(from_peer), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    transport.set_write_buffer_limits(0)  # what was drained has left this process
    to_peer = asyncio.StreamWriter(transport, protocol, None, loop)
    asking = asyncio.create_task(_ask(from_peer, to_agent))
    await _copy(from_agent, to_peer)
    asking.cancel()
    for writer in (to_agent, to_peer):
        writer.close()


async def _ask(from_peer: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
    await _copy(from_peer, to_agent)
    with contextlib.suppress(OSError):
        to_agent.write_eof()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
