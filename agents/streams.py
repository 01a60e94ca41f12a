"""Reading and writing frames on asyncio streams."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from kvtop.agents.wire import HEADER, FrameTooLarge, MalformedFrame, encode_frame


class Reader(Protocol):
    """The reading half of asyncio's and asyncssh's streams."""

    async def readexactly(self, n: int, /) -> bytes:
        """Return exactly `n` bytes, or raise asyncio.IncompleteReadError."""
        ...


class Writer(Protocol):
    """The writing half of asyncio's and asyncssh's streams."""

    def write(self, data: bytes, /) -> None:
        """Queue bytes."""

    async def drain(self) -> None:
        """Wait until more may be queued."""

    def close(self) -> None:
        """End the stream."""


async def read_frame(reader: Reader, limit_bytes: int) -> bytes | None:
    """Read one frame's body, or None at a clean end of the stream.

    Raises:
        FrameTooLarge: the frame announces more than `limit_bytes`.
        MalformedFrame: the stream ends inside a frame.
    """
    try:
        header = await reader.readexactly(HEADER.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MalformedFrame("the connection ended inside a frame's header") from error
        return None
    (length,) = HEADER.unpack(header)
    if length > limit_bytes:
        raise FrameTooLarge(f"a frame of {length} bytes was announced, the limit is {limit_bytes}")
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise MalformedFrame(
            f"the connection ended after {len(error.partial)} of a frame's {length} bytes"
        ) from error


async def write_frame(writer: Writer, message: msgspec.Struct) -> None:
    """Write one frame, and wait until the other side takes it."""
    await write(writer, encode_frame(message))


async def write(writer: Writer, frame: bytes) -> None:
    """Write what is a frame already, and wait until the other side takes it."""
    writer.write(frame)
    await writer.drain()
