"""Keeping an error of kvtop's own from reaching vLLM, whose engine would end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from kvtop.connector.upstream import init_logger

logger = init_logger("vllm.kvtop.contained")
_P = ParamSpec("_P")


def contained(method: Callable[_P, None]) -> Callable[_P, None]:
    """Log whatever `method` raises, and go on without what it did not do."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("a bug in kvtop: %s failed; the engine goes on", method.__qualname__)

    return run
