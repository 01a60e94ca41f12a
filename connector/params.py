"""Checks `kv_transfer_params`: they come from outside, and upstream ends the whole engine on some of them.

Read in vLLM 0.32 and 0.33, on the scheduler's and the workers' side:

- `push_scheduler.update_state_after_alloc` and `NixlConnectorMetadata` index the peer's fields without asking
  whether they are there, and `on_new_request` calls `get` on whatever came (`vllm_xargs` can bring a number);
- heartbeats are joined and encoded from request ids, and `pp_size > 1`, `pp_size * ranks` and (0.33)
  `generation < remote_registration_generation` are calculated on the engine's thread: a null there ends it;
- `pull_worker` takes one list of block ids per KV cache group and turns each id into an address;
- `NOTES` are what it writes into a request's parameters for itself.

Whatever is wrong makes that one request compute locally. What cannot be seen here, whether a peer has the
blocks that are named, is seen after the handshake: `beyond`.
"""

from __future__ import annotations

import ipaddress
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

MAX_FIELDS: Final = 128
"""Most fields of one request; upstream knows 15."""
MAX_NAME: Final = 512
"""Longest engine id or request id, in characters. vllm-router's request ids hold two addresses."""
MAX_HOST: Final = 253
MAX_PORT: Final = 65_535
MAX_RANKS: Final = 4096
MAX_BLOCKS: Final = 1 << 20
"""Most block ids of one request: 16 million tokens in blocks of 16."""
MAX_BLOCK_ID: Final = (1 << 31) - 1
"""Upstream computes addresses from 32-bit ids."""
MAX_COUNT: Final = 1 << 40
NOTES: Final = frozenset({"_p_side_truncated", "_remote_blocks_processed"})
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_PEER: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
_NEVER_NULL: Final = ("tp_size", "dcp_size", "pp_size", "remote_registration_generation")
"""Upstream has a default for where these are absent, and calculates with a null where it is given one."""

Good = Callable[[object], bool]


class _Short(reprlib.Repr):
    """A repr whose cost does not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxstring = 2, 4, 4, 40

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Return how many fields a map has: reprlib would sort them all."""
        del level
        return f"{{{len(value)} fields}}"


_short = _Short()


class BadParameter(ValueError):
    """A field cannot be obeyed; the message names it."""

    def __init__(self, field: str, expected: str, value: object, where: str = "kv_transfer_params") -> None:
        """Say what was expected, and show the start of what came. An empty `field` means all of them."""
        name = f"{where}.{field}" if field else where
        super().__init__(f"{name} must be {expected}, not {shown(value)}")
        self.field = field


def shown(value: object) -> str:
    """Return the start of a value's repr, at little cost: it may be a megabyte, or nest for ever.

    >>> shown("x" * 1000)
    "'xxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxx'"
    >>> shown([1, [2, [3, [4]]]])
    '[1, [2, [...]]]'
    """
    text = _short.repr(value)
    return text if len(text) <= 60 else f"{text[:60]}… ({type(value).__name__})"


def check(params: object, groups: int, engine_id: str = "") -> dict[str, Any]:
    """Return parameters that upstream can obey, or raise BadParameter.

    What routers and peers send passes as it is: null for what is not known, on P no peer at all, on D no
    block ids in push. Only a null that upstream would calculate with is left out.

    Args:
        params: what came with the request.
        groups: how many KV cache groups this engine transfers.
        engine_id: this engine's own, which no peer can have.

    >>> check({"do_remote_decode": True, "remote_host": None, "pp_size": None}, 1)
    {'do_remote_decode': True, 'remote_host': None}
    """
    if not isinstance(params, dict):
        raise BadParameter("", "a map", params)
    if len(params) > MAX_FIELDS:
        raise BadParameter("", f"a map of at most {MAX_FIELDS} fields", params)
    for field in NOTES & params.keys():
        raise BadParameter(field, "absent: it is the engine's own", params[field])
    _check_fields(params, groups)
    receives, sends = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if receives and sends:
        raise BadParameter("do_remote_prefill", "false where do_remote_decode is true", True)
    if receives:
        check_peer(params, engine_id)
    return {field: value for field, value in params.items() if value is not None or field not in _NEVER_NULL}


def check_peer(params: Mapping[str, Any], engine_id: str) -> None:
    """Raise BadParameter unless the parameters name a peer whose KV can be had."""
    for field in _PEER:
        if params.get(field) is None:
            raise BadParameter(field, "given with a peer's KV", None)
    if params["remote_engine_id"] == engine_id:
        raise BadParameter("remote_engine_id", "another engine's", engine_id)


def _check_fields(params: Mapping[str, Any], groups: int) -> None:
    """Check each field by itself; null is as good as absent."""
    for field, (expected, good) in _FIELDS.items():
        value = params.get(field)
        if value is not None and not good(value):
            raise BadParameter(field, expected, value)
    block_ids = params.get("remote_block_ids")
    if block_ids is not None and not are_block_ids(block_ids, groups):
        expected = f"a list of block ids for each of {groups} KV cache groups"
        raise BadParameter("remote_block_ids", expected, block_ids)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME and value.isprintable()


def is_host(value: object) -> bool:
    """Whether a value can name a host.

    >>> [is_host(each) for each in ("node-7.rack", "10.0.0.1", "::1", "", "a b", "x" * 300, 7)]
    [True, True, True, False, False, False, False]
    """
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_HOST:
        return False
    if _HOST.fullmatch(value):
        return True
    if not (value.isascii() and value.isprintable()) or " " in value:
        return False
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
    return (
        len(value) == groups
        and all(isinstance(group, list | tuple) for group in value)
        and sum(map(len, value)) <= MAX_BLOCKS
        and all(map(_are_ids, value))
    )


def _are_ids(group: Sequence[Any]) -> bool:
    """Whether these are ids; on the engine's thread, so without a step in Python per id."""
    return not group or (set(map(type, group)) == {int} and min(group) >= 0 and max(group) <= MAX_BLOCK_ID)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_mode(value: object) -> bool:
    return isinstance(value, str) and value in ("push", "pull")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _whole(low: int, high: int) -> Good:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_a_name = (f"a text of 1 to {MAX_NAME} printable characters", _is_name)
_a_host = ("a host name or an IP address", is_host)
_a_port = (f"a port from 1 to {MAX_PORT}", _whole(1, MAX_PORT))
_ranks = (f"a whole number from 1 to {MAX_RANKS}", _whole(1, MAX_RANKS))
_a_count = (f"a whole number from 0 to {MAX_COUNT}", _whole(0, MAX_COUNT))
_a_flag = ("true, false or null", _is_flag)
_FIELDS: Final[Mapping[str, tuple[str, Good]]] = {
    "do_remote_prefill": _a_flag,
    "do_remote_decode": _a_flag,
    "remote_engine_id": _a_name,
    "remote_request_id": _a_name,
    "remote_host": _a_host,
    "remote_port": _a_port,
    "tp_size": _ranks,
    "dcp_size": _ranks,
    "pp_size": _ranks,
    "remote_num_tokens": _a_count,
    "remote_block_size": _a_count,
    "remote_prefill_cached_tokens": _a_count,
    "remote_registration_generation": _a_count,
    "remote_blocks_expiry_time": ("a number of seconds", _is_seconds),
    "transfer_mode": ("push or pull", _is_mode),
}
_REGISTRATION: Final[Mapping[str, tuple[str, Good]]] = {
    "request_id": _a_name,
    "decode_engine_id": _a_name,
    "decode_host": _a_host,
    "decode_port": _a_port,
    "decode_tp_size": _ranks,
}


def beyond(block_ids: Sequence[Any], blocks: int) -> int | None:
    """Return a block id that a cache of `blocks` blocks does not have, None if all are in it.

    >>> beyond([[0, 9], []], 10), beyond([[0], [10]], 10), beyond([10], 10)
    (None, 10, 10)
    """
    groups = [group if isinstance(group, list | tuple) else [group] for group in block_ids]
    highest = max((max(group) for group in groups if group), default=0)
    return highest if highest >= blocks else None


def check_registration(data: object, groups: int) -> dict[str, Any]:
    """Return D's registration, which came from a peer, or raise BadParameter naming what P cannot serve.

    Where there is but one KV cache group, upstream takes its ids without a list around them too.
    """
    if not isinstance(data, dict):
        raise BadParameter("", "a map", data, where="registration")
    for field, (expected, good) in _REGISTRATION.items():
        if not good(data.get(field)):
            raise BadParameter(field, expected, data.get(field), where="registration")
    block_ids = data.get("local_block_ids")
    flat = groups == 1 and isinstance(block_ids, list) and block_ids and isinstance(block_ids[0], int)
    if not are_block_ids([block_ids] if flat else block_ids, groups):
        expected = f"block ids for each of {groups} KV cache groups"
        raise BadParameter("local_block_ids", expected, block_ids, where="registration")
    return data
