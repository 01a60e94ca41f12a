"""Waiting for conditions instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], what: str, *, timeout_s: float = 10.0, poll_s: float = 0.01
) -> None:
    """Return as soon as `condition()` is true; fail, naming `what` was awaited, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(poll_s)
