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
    """Copy bytes both ways until either side ends.

    Raises:
        FileNotFoundError, ConnectionRefusedError: no agent listens there.
        PermissionError: this user may not connect.
    """
    loop = asyncio.get_running_loop()
    from_agent, to_agent = await asyncio.open_unix_connection(path)
    from_peer = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(from_peer), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    to_peer = asyncio.StreamWriter(transport, protocol, None, loop)
    copies = {
        asyncio.create_task(_copy(from_peer, to_agent)),
        asyncio.create_task(_copy(from_agent, to_peer)),
    }
    _, pending = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for writer in (to_agent, to_peer):
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
