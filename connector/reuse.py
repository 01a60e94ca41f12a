"""Turn 2's prefill reads turn 1's KV back from D: upstream's `bidirectional_kv_xfer`, here in either mode.

D holds the blocks of a request that has ended, and its answer tells the client where. A client that sends
that with its next turn has P read what P has not cached, compute the rest, and hand over as always.

Upstream (0.32) pairs P's blocks with the last ones of D's. That fits only where D's end with the last token
that is read: one block more, for a token that D had yet to compute, and each block gets its neighbour's KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reads_back(params: Mapping[str, Any] | None) -> bool:
    """Whether a request on P names KV on D that is still to be read."""
    return bool(
        params
        and params.get("do_remote_decode")
        and params.get("remote_block_ids")
        and not params.get("_remote_blocks_processed")
    )


def fitting(block_ids: list[list[int]], held: int, wanted: int, block_size: int) -> list[list[int]]:
    """Return the blocks that hold the first `wanted` tokens, or as many as D holds.

    None where the peer names not as many blocks as `held` tokens fill (perhaps one more, for a token that it
    had yet to compute), or where the cache has several groups, whose blocks need not begin with the first.

    >>> fitting([[4, 5, 6]], 32, 99, 16), fitting([[4, 5, 6]], 33, 99, 16), fitting([[4]], 33, 99, 16)
    ([[4, 5]], [[4, 5, 6]], [])
    """
    if held <= 0 or len(block_ids) != 1 or len(block_ids[0]) - _blocks(held, block_size) not in (0, 1):
        return []
    return [block_ids[0][: _blocks(min(held, wanted), block_size)]]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
