"""Checks `kv_transfer_params`: they come from outside, and upstream ends the whole engine on some of them.

Read in vLLM 0.32 and 0.33: `push_scheduler.update_state_after_alloc` and `NixlConnectorMetadata` index the
remote fields without asking whether they are there; `pull_worker` takes `remote_block_ids` for one list per
KV cache group of this engine, and turns each id into an address; `NOTES` are what it writes into a request's
parameters for itself, and must not come from a client.

Whatever is wrong makes that one request compute locally.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_NAME: Final = 512
"""Longest engine id or request id, in characters. vllm-router's request ids hold two addresses."""
MAX_HOST: Final = 253
MAX_PORT: Final = 65_535
MAX_RANKS: Final = 4096
MAX_BLOCKS: Final = 1 << 20
"""Most block ids of one request: 16 million tokens in blocks of 16."""
MAX_BLOCK_ID: Final = (1 << 31) - 1
"""Upstream computes addresses from 32-bit ids."""
MAX_TOKENS: Final = 1 << 40
NOTES: Final = frozenset({"_p_side_truncated", "_remote_blocks_processed"})
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_PEER: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


class BadParameter(ValueError):
    """A field of a request's `kv_transfer_params` cannot be obeyed; the message names it."""

    def __init__(self, field: str, expected: str, value: object) -> None:
        """Say what was expected, and show the start of what came."""
        super().__init__(f"kv_transfer_params.{field} must be {expected}, not {shown(value)}")
        self.field = field


def shown(value: object) -> str:
    """Return a value's repr without its middle: it may be a megabyte.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx… (str)"
    """
    try:
        text = repr(value[:40]) if isinstance(value, str) else repr(value)
    except Exception:  # a client may nest lists deeper than repr can follow
        text = "…"
    return text if len(text) <= 40 else f"{text[:40]}… ({type(value).__name__})"


def check(params: Mapping[str, Any], groups: int) -> None:
    """Raise BadParameter where parameters cannot be obeyed by an engine of `groups` KV cache groups.

    What routers send passes: null for what is not known, on P no peer at all, on D no block ids in push.

    >>> check({"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}, 1)
    """
    _check_notes(params)
    for field in ("do_remote_prefill", "do_remote_decode"):
        _check(params, field, "true, false or null", lambda value: isinstance(value, bool))
    receives, sends = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if receives and sends:
        raise BadParameter("do_remote_prefill", "false where do_remote_decode is true", True)
    _check_fields(params, groups)
    if receives:
        for field in _PEER:
            if params.get(field) is None:
                raise BadParameter(field, "given with do_remote_prefill", None)


def _check_notes(params: Mapping[Any, Any]) -> None:
    for field in NOTES & params.keys():
        raise BadParameter(field, "absent: it is the engine's own", params[field])


def _check_fields(params: Mapping[str, Any], groups: int) -> None:
    """Check each field by itself; null is as good as absent."""
    name = f"a text of 1 to {MAX_NAME} printable characters"
    for field in ("remote_engine_id", "remote_request_id"):
        _check(params, field, name, _is_name)
    _check(params, "remote_host", "a host name or an IP address", is_host)
    _check(params, "remote_port", f"a port from 1 to {MAX_PORT}", lambda value: _whole(value, 1, MAX_PORT))
    for field in ("tp_size", "dcp_size", "pp_size"):
        _check(
            params,
            field,
            f"a whole number from 1 to {MAX_RANKS}",
            lambda value: _whole(value, 1, MAX_RANKS),
        )
    for field in ("remote_num_tokens", "remote_block_size", "remote_prefill_cached_tokens"):
        _check(params, field, "a whole number from 0", lambda value: _whole(value, 0, MAX_TOKENS))
    _check(params, "remote_blocks_expiry_time", "a number of seconds", _is_seconds)
    expected = f"a list of block ids for each of {groups} KV cache groups"
    _check(params, "remote_block_ids", expected, lambda value: are_block_ids(value, groups))


def _check(params: Mapping[str, Any], field: str, expected: str, good: Any) -> None:
    value = params.get(field)
    if value is not None and not good(value):
        raise BadParameter(field, expected, value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME and value.isprintable() and _encodes(value)


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_host(value: object) -> bool:
    """Whether a value can name a host.

    >>> [is_host(each) for each in ("node-7.rack", "10.0.0.1", "::1", "", "a b", "x" * 300, 7)]
    [True, True, True, False, False, False, False]
    """
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_HOST:
        return False
    if _HOST.fullmatch(value):
        return True
    try:
        ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        return False
    return True


def are_block_ids(value: object, groups: int) -> bool:
    """Whether a value holds one list of block ids for each KV cache group; no list at all means none.

    >>> [are_block_ids(each, 1) for each in ([[1, 2]], [], [[]], [1, 2], [[1], [2]], [[-1]], [[True]])]
    [True, True, True, False, False, False, False]
    """
    if not isinstance(value, list | tuple):
        return False
    if not value:
        return True
    if (
        len(value) != groups
        or sum(len(each) for each in value if isinstance(each, list | tuple)) > MAX_BLOCKS
    ):
        return False
    return all(
        isinstance(each, list | tuple) and all(_whole(block, 0, MAX_BLOCK_ID) for block in each)
        for each in value
    )


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def beyond(block_ids: Sequence[Sequence[int]], blocks: int) -> int | None:
    """Return a block id that a cache of `blocks` blocks does not have, None if all are in it.

    >>> beyond([[0, 9], []], 10), beyond([[0], [10]], 10)
    (None, 10)
    """
    highest = max((max(group) for group in block_ids if len(group)), default=0)
    return highest if highest >= blocks else None


def check_registration(data: object, groups: int) -> dict[str, Any]:
    """Return D's registration, which came from a peer, or raise BadParameter naming what P cannot serve."""
    if not isinstance(data, dict):
        raise BadParameter("registration", "a map", data)
    for field, good, expected in (
        ("request_id", _is_name, "a request id"),
        ("decode_engine_id", _is_name, "an engine id"),
        ("decode_host", is_host, "a host name or an IP address"),
        ("decode_port", lambda value: _whole(value, 1, MAX_PORT), "a port"),
        ("decode_tp_size", lambda value: _whole(value, 1, MAX_RANKS), "a number of ranks"),
        ("local_block_ids", lambda value: are_block_ids(value, groups), "block ids for each KV cache group"),
    ):
        if not good(data.get(field)):
            raise BadParameter(field, expected, data.get(field))
    return data
