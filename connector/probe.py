"""Whether a peer engine still lives: asked of its handshake port, as NIXL does not tell.

A stopped process (SIGSTOP) keeps its connections and its port, and NIXL reports its transfers as in progress
for ever; a dead one refuses. What is dead can write no more, what hangs may still.
"""

from __future__ import annotations

import socket
import time
from typing import Final, Literal, NamedTuple

import msgspec
import zmq

from kvtop.connector.upstream import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
    make_zmq_path,
    zmq_ctx,
)

ANSWER_TIMEOUT_MS: Final = 2000
CONNECT_TIMEOUT_S: Final = 1.0
DEAD_GRACE_S: Final = 1.0
"""What a dead peer had sent may still lie in a socket of ours, and is written from there."""

PeerState = Literal["alive", "hung", "gone", "unreachable"]


class Probed(NamedTuple):
    """What a look at a peer showed."""

    state: PeerState
    reason: str


def look_after(engine_id: str, host: str, port: int) -> Probed:
    """Ask the engine behind a handshake port who it is. Blocks for up to some seconds; never raises."""
    try:
        if _refuses(host, port):
            time.sleep(DEAD_GRACE_S)
            if _refuses(host, port):  # else its listener was only being opened anew
                return Probed("gone", "the peer is gone: nothing listens on its handshake port")
    except OSError as error:
        return Probed("unreachable", f"the peer cannot be reached: {error}")
    try:
        found = _engine_id_at(host, port)
    except zmq.Again:
        return Probed("hung", "the peer hangs: its handshake port accepts connections and does not answer")
    except Exception as error:
        return Probed("unreachable", f"the peer's answer cannot be understood: {error}")
    if found != engine_id:
        time.sleep(DEAD_GRACE_S)
        return Probed("gone", f"the peer is gone: engine {found} has taken its place")
    return Probed("alive", "")


def _refuses(host: str, port: int) -> bool:
    """Whether nothing listens there. Raises OSError where that cannot be said."""
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True


def _engine_id_at(host: str, port: int) -> str:
    """Return the id of the engine that serves handshakes there.

    Raises:
        zmq.Again: no answer in time.
        msgspec.DecodeError, msgspec.ValidationError: the answer is no handshake.
    """
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as requester:
        requester.setsockopt(zmq.RCVTIMEO, ANSWER_TIMEOUT_MS)
        requester.setsockopt(zmq.LINGER, 0)
        requester.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        payload = msgspec.msgpack.decode(requester.recv_multipart()[0], type=NixlHandshakePayload)
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    return str(metadata.engine_id)
