"""The wire: length-prefixed msgpack frames and the versioned hello that opens every connection.

One format serves all of kvtop's sockets: engines to the agent (`ingest.sock`), consoles and scripts to the
agent (`view.sock`, `operate.sock`), and the same bytes inside an SSH channel.

A frame is a 4-byte big-endian unsigned length followed by that many bytes of msgpack. The first frame each
side sends is a hello: a msgpack map whose `wire_version` is read on its own (`Preamble`) and compared
before anything else is decoded, so that an agent and a console of different versions part with a clear
message instead of a decoding error.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeVar

import msgspec

WIRE_VERSION: Final = 1
"""Version of every message in `kvtop.agents.events` and `kvtop.agents.model`.

Raised when a message changes so that an older reader would misread it. A field added with a default at the
end does not raise it. History:

1. First version: hello, batches of engine events, snapshot and deltas.
"""

HEADER: Final = struct.Struct(">I")
MAX_INBOUND_FRAME_BYTES: Final = 1 << 20
"""Largest frame that an agent reads from an engine or a client."""
MAX_OUTBOUND_FRAME_BYTES: Final = 64 << 20
"""Largest frame that a console reads from an agent (a snapshot of a busy node)."""

_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


class WireError(Exception):
    """Root of what can go wrong on a connection; the message says what and what to do.

    WireError
    ├── FrameTooLarge    a length above the reader's limit
    ├── MalformedFrame   bytes that do not decode as the expected message
    ├── VersionMismatch  the other side speaks another wire version
    └── Refused          the other side closed the connection with a reason
    """


class FrameTooLarge(WireError):
    """A frame announced more bytes than the reader accepts."""


class MalformedFrame(WireError):
    """A frame's bytes are not the message that was expected there."""


class VersionMismatch(WireError):
    """The two sides speak different wire versions."""


class Refused(WireError):
    """The other side answered the hello with a refusal."""


class Preamble(msgspec.Struct, frozen=True):
    """What every version's hello holds, whatever else it holds."""

    wire_version: int
    software: str = ""


class Clock(msgspec.Struct, frozen=True):
    """One reading of both clocks of a host, to place monotonic stamps in wall time."""

    monotonic_ns: int
    """CLOCK_MONOTONIC, ns: the domain of every `*_ns` stamp of that host."""
    wall_ns: int
    """Unix time, ns."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The agent's answer to a hello that it accepts."""

    wire_version: int
    software: str
    """For people, e.g. `kvtop 0.1.0`."""
    node: str
    agent_pid: int
    agent_started_ns: int
    """CLOCK_MONOTONIC, ns: tells one incarnation of the agent from the next."""
    role: Literal["engine", "view", "operate"]


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """The agent's last frame on a connection that it does not accept."""

    wire_version: int
    software: str
    reason: str
    """One sentence: what was wrong and what to do."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return `message` as one frame: header and msgpack body."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode(body: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """Decode one frame's body.

    Raises:
        MalformedFrame: the body is not what `decoder` expects.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedFrame(f"a frame of {len(body)} bytes cannot be decoded: {error}") from error


_preamble = msgspec.msgpack.Decoder(Preamble)


def check_version(body: bytes) -> Preamble:
    """Read a hello's version and compare it with ours, before the rest of it is decoded.

    Raises:
        MalformedFrame: the body is no hello.
        VersionMismatch: the other side speaks another version.
    """
    preamble = decode(body, _preamble)
    if preamble.wire_version != WIRE_VERSION:
        theirs = preamble.software or "the other side"
        raise VersionMismatch(
            f"{theirs} speaks wire version {preamble.wire_version}, this side speaks {WIRE_VERSION}: "
            "install the same kvtop version on both ends"
        )
    return preamble
