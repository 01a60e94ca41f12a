"""Orders on their way to engines, and the answers that are still to come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtop.agents.events import OrderAnswer
from kvtop.agents.instances import Attachment
from kvtop.agents.orders import Order
from kvtop.agents.text import span

ANSWER_TIMEOUT_S: Final = 10.0
"""A healthy engine obeys within a step; one whose step takes longer is as good as stopped."""


@dataclass(frozen=True)
class Answered:
    """What became of an order."""

    ok: bool
    message: str
    reached: bool = True
    """Whether the engine itself answered. Where it did not, the order may yet be obeyed."""
    timed_out: bool = False
    beside: tuple[str, ...] = ()
    """What else an operator must know: the answers of the processes beside the engine."""


class Dispatch:
    """Sends orders, each under an id of its own, and matches answers with them."""

    def __init__(self) -> None:
        """Begin with nothing under way."""
        # An answer to an order of an agent before this one must not pass for one of this agent's.
        self._last_id = time.monotonic_ns() // 1000
        self._pending: dict[int, tuple[Attachment, asyncio.Future[Answered]]] = {}

    async def order(
        self, to: Attachment, make: Callable[[int], Order], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Answered:
        """Send the order that `make` builds from its id, and return what became of it; never raises."""
        self._last_id += 1
        order_id = self._last_id
        if to.send is None:
            return Answered(False, f"{to.label} is not attached", reached=False)
        if not to.send(make(order_id)):
            return Answered(False, f"{to.label} takes no more orders: it is stopped", reached=False)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._pending[order_id] = (to, answer)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return Answered(
                False,
                "the engine did not answer: it is stopped, or in a long step "
                f"(waited {span(timeout_s)}; the order takes effect if it goes on)",
                reached=False,
                timed_out=True,
            )
        finally:
            del self._pending[order_id]

    def answered(self, by: Attachment, answer: OrderAnswer) -> None:
        """Take an engine's answer; one that nobody waits for any more is let be."""
        to, future = self._pending.get(answer.order_id, (None, None))
        if to is by and future is not None and not future.done():
            future.set_result(Answered(answer.ok, answer.message))

    def detached(self, gone: Attachment) -> None:
        """Fail what a process that has gone did not answer."""
        for to, future in self._pending.values():
            if to is gone and not future.done():
                reason = f"{gone.label} detached before it answered: it ended, or lost its connection"
                future.set_result(Answered(False, reason, reached=False))
