"""Who is at the other end of one of the agent's sockets.

The kernel vouches for the uid. Behind the agent's own SSH server everybody comes from the agent's own
process, which therefore says in its end's address whose key it let in; an address that another process gave
itself counts for nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

MAX_ADDRESS_BYTES: Final = 107
_PREFIX: Final = b"\0kvtop-ssh "
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Who:
    """Who asks, and through which door."""

    socket: Literal["view", "operate"]
    uid: int | None = None
    ssh_key: str = ""
    """Fingerprint of the key that the agent's own SSH server let in."""
    ssh_address: str = ""
    """From where that key came."""


def peer_credentials(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)


def who_is(writer: asyncio.StreamWriter, door: Literal["view", "operate"]) -> Who:
    """Return who is at the other end of a connection to one of the consoles' sockets."""
    pid, uid = peer_credentials(writer)
    address = writer.get_extra_info("peername")
    if pid == os.getpid() and isinstance(address, bytes) and address.startswith(_PREFIX):
        _, key, came_from = address.removeprefix(_PREFIX).decode("ascii", "replace").split(" ", 2)
        return Who(door, uid, key, came_from)
    return Who(door, uid)


async def connect_for(
    path: Path, ssh_key: str, ssh_address: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect this process to one of its own sockets on behalf of an SSH client.

    Raises:
        OSError: the socket is not there, or takes nobody.
    """
    told = f"{os.getpid()}.{next(_numbers)} {ssh_key} {ssh_address}".encode("ascii", "replace")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.bind((_PREFIX + told)[:MAX_ADDRESS_BYTES])
        await asyncio.get_running_loop().sock_connect(connection, os.fspath(path))
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
