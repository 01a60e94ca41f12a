"""Which of the two halves a request takes: connector.md's three rules, as a pure function and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtop.agents.events import Direction

_DIRECTIONS: dict[object, Direction] = {"push": "push", "pull": "pull"}


def direction_of(params: Mapping[str, Any], mode: Direction) -> Direction:
    """Return the direction of a request with these `kv_transfer_params` on an instance in `mode`.

    A decode request without remote block ids can only be pushed to (upstream's pull half would end the
    engine). Else an explicit `transfer_mode` wins. Anything else goes the instance's way.

    >>> direction_of({"do_remote_decode": True, "transfer_mode": "pull"}, "push")
    'pull'
    >>> direction_of({"do_remote_prefill": True, "remote_block_ids": None}, "pull")
    'push'
    >>> direction_of({"do_remote_decode": True}, "pull")
    'pull'
    """
    if params.get("do_remote_prefill") and not params.get("remote_block_ids"):
        return "push"
    wanted = params.get("transfer_mode")
    if isinstance(wanted, str) and wanted in _DIRECTIONS:
        return _DIRECTIONS[wanted]
    return mode


class Router:
    """Remembers each live request's direction from its arrival to its end.

    The direction is read once: a change of mode in between must not split a request over both halves.
    """

    def __init__(self, mode: Direction) -> None:
        """Start with `mode` as the direction of requests that do not name one."""
        self.mode = mode
        self.peer_modes: dict[str, Direction] = {}
        """Exceptions, by the peer's engine id."""
        self._routes: dict[str, Direction] = {}

    def set_mode(self, mode: Direction, peer: str | None = None) -> None:
        """Have requests that arrive from now on take `mode`; with a peer, those only that name it.

        A mode for all peers forgets the exceptions made before.
        """
        if peer is None:
            self.mode = mode
            self.peer_modes.clear()
        else:
            self.peer_modes[peer] = mode

    def direction(self, request_id: str, params: Mapping[str, Any] | None) -> Direction:
        """Return the request's direction, fixing it on the first call."""
        known = self._routes.get(request_id)
        if known is not None:
            return known
        if not params:
            return self.mode
        peer = params.get("remote_engine_id")
        mode = self.peer_modes.get(peer, self.mode) if isinstance(peer, str) else self.mode
        chosen = self._routes[request_id] = direction_of(params, mode)
        return chosen

    def known(self, request_id: str) -> Direction | None:
        """Return the direction of a live request, None once it has ended."""
        return self._routes.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._routes.pop(request_id, None)

    def __len__(self) -> int:
        """Return how many live requests have a fixed direction."""
        return len(self._routes)
