"""What two of kvtop's connectors tell each other, as NIXL notifications beside upstream's.

Upstream has no message for "this transfer will not come" or "I no longer want it", so its decode requests can
wait for ever. A stock peer must never get one of these (its engine would end on a notification that it cannot
parse): `is_kvtop_agent` tells from a NIXL agent's name who understands them.

D's own vLLM request id names the transfer in all of them: it is in every registration.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from kvtop.agents.events import ErrorClass

PREFIX: Final = b"KVTOP:"
AGENT_NAME_PREFIX: Final = "kvtop1-"
"""How the NIXL agents of connectors that understand these messages are named; the digit is their version."""


class Peer(msgspec.Struct, frozen=True):
    """Where an engine's handshakes are served."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """D to P: do not write any more; P frees its blocks, and answers `Settled` once no write can come."""

    request_id: str
    reason: str
    prefill_request_id: str | None = None
    """P's own request id, where D knows it: P's ids and D's differ in vLLM's random suffix."""
    reply_to: Peer | None = None
    """D itself; None where no answer is wanted."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """P to D: this transfer failed or will not be made; the request must go on without it."""

    request_id: str
    error_class: ErrorClass
    reason: str
    settled: bool
    """Whether no write can come any more; else `Settled` follows."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """P to D: do not wait for a write, read these blocks.

    The answer to a registration for blocks that are meant to be read. vllm-router learns from P's first
    answers that P pushes, and dispatches to both at once from then on: then D can only register, whatever P's
    mode is.
    """

    request_id: str
    prefill_request_id: str
    block_ids: list[list[int]]
    """P's, in the scheduler's count, for each KV cache group."""
    port: int
    """Where P's pull half serves handshakes."""


class Settled(msgspec.Struct, tag="settled", frozen=True):
    """P to D: whatever became of the transfer, from this rank of P no write can come any more."""

    request_id: str


PeerMessage = Drop | Failed | Read | Settled
_decoder = msgspec.msgpack.Decoder(PeerMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: PeerMessage) -> bytes:
    """Return a message as a NIXL notification.

    >>> decode(encode(Settled("r")))
    Settled(request_id='r')
    """
    return PREFIX + _encoder.encode(message)


def decode(notification: bytes) -> PeerMessage | None:
    """Return what a notification that begins with `PREFIX` says, None where that cannot be understood."""
    try:
        return _decoder.decode(notification[len(PREFIX) :])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None


def new_agent_name() -> str:
    """Return a NIXL agent name that tells peers that these messages are understood."""
    return f"{AGENT_NAME_PREFIX}{uuid.uuid4()}"


def agent_name(name: str | bytes) -> str:
    """Return a NIXL agent's name as text: `add_remote_agent` returns bytes, notifications come with text."""
    return name.decode() if isinstance(name, bytes) else name


def is_kvtop_agent(name: str) -> bool:
    """Whether a peer's NIXL agent understands these messages.

    >>> is_kvtop_agent(new_agent_name()), is_kvtop_agent(str(uuid.uuid4()))
    (True, False)
    """
    return name.startswith(AGENT_NAME_PREFIX)
