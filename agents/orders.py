"""What an agent orders an engine to do, and what the engine answers.

Orders are frames from the agent on `ingest.sock`, after its welcome. An engine process obeys the kinds that
its hello names (`EngineHello.orders`): the engine core all of them, an API server with the admission
middleware only `SetDraining`. It answers each with an `OrderAnswer` among its events, once the order has
taken effect inside the engine (an idle engine is woken), and says in `InstanceReport` what holds then.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvtop.agents.events import Direction, Side, Total

OrderKind = Literal["set-mode", "set-draining", "cancel-transfer", "evict-peer"]
ORDER_KINDS: Final[tuple[OrderKind, ...]] = ("set-mode", "set-draining", "cancel-transfer", "evict-peer")


class SetMode(msgspec.Struct, tag="set-mode", frozen=True):
    """Requests that arrive from now on take this direction unless they name one."""

    order_id: Total
    mode: Direction
    peer: str | None = None
    """Only with this peer (its engine id); None means all peers, and forgets the exceptions made before."""


class SetDraining(msgspec.Struct, tag="set-draining", frozen=True):
    """Start no new KV transfer from now on, or start them again."""

    order_id: Total
    draining: bool


class CancelTransfer(msgspec.Struct, tag="cancel-transfer", frozen=True):
    """End one transfer; what it may still write to stays in quarantine."""

    order_id: Total
    side: Side
    """Which side of the transfer this engine is."""
    request_id: str
    """This engine's own vLLM request id."""


class EvictPeer(msgspec.Struct, tag="evict-peer", frozen=True):
    """Forget a peer's NIXL state: the next request handshakes afresh."""

    order_id: Total
    peer_engine_id: str


EVICTED: Final = "forgotten: the next request handshakes afresh"
EVICTION_REFUSED: Final = "transfers with it, or a handshake, are under way: cancel them or try again"
"""How an engine answers `EvictPeer`; the plan quotes it."""


Order = SetMode | SetDraining | CancelTransfer | EvictPeer

ORDER = msgspec.msgpack.Decoder(Order)
