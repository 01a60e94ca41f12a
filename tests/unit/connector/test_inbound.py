"""D's blocks are never reused while a write may still reach them, and always reused once none can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtop.connector.inbound import Inbound


class Blocks:
    """Counts references as vLLM's block pool does."""

    def __init__(self) -> None:
        self.references: Counter[str] = Counter()

    def touch(self, blocks: Iterable[str]) -> None:
        self.references.update(blocks)

    def free_blocks(self, blocks: Iterable[str]) -> None:
        self.references.subtract(blocks)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def inbound(ranks: int = 1) -> tuple[Inbound, Blocks, Clock]:
    clock, pool = Clock(), Blocks()
    waiting = Inbound(deadline_s=5.0, ranks=ranks, clock=clock)
    waiting.block_pool = pool
    return waiting, pool, clock


def test_what_failed_stays_in_use_until_nothing_can_be_written() -> None:
    waiting, pool, _ = inbound()
    waiting.expect("r", "push", ["a", "b"])

    assert waiting.failed("r")
    assert pool.references == {"a": 1, "b": 1}
    assert waiting.quarantined_blocks == 2
    assert waiting.quarantined_since_ns is not None

    assert waiting.settle(Counter({"r": 1})) == ["r"]
    assert +pool.references == {}
    assert waiting.quarantined_blocks == 0
    assert waiting.quarantined_since_ns is None


def test_ranks_on_which_it_arrived_count_as_settled() -> None:
    waiting, pool, _ = inbound(ranks=2)
    waiting.expect("r", "push", ["a"])

    assert waiting.settle(Counter({"r": 1})) == []  # it has arrived on one rank, and fails on the other
    assert waiting.failed("r")
    assert pool.references == {"a": 1}
    assert waiting.settle(Counter({"r": 1})) == ["r"]
    assert +pool.references == {}


def test_what_ranks_said_of_a_request_that_arrived_is_forgotten() -> None:
    waiting, _, _ = inbound(ranks=2)
    waiting.expect("r", "push", ["a"])
    waiting.settle(Counter({"r": 2}))
    waiting.arrived("r")
    waiting.expect("r", "push", ["b"])

    assert waiting.failed("r"), "a later wait under the same id would not be protected"


def test_every_rank_has_to_settle() -> None:
    waiting, pool, _ = inbound(ranks=2)
    waiting.expect("r", "push", ["a"])
    waiting.failed("r")

    assert waiting.settle(Counter({"r": 1})) == []
    assert pool.references == {"a": 1}
    assert waiting.settle(Counter({"r": 1})) == ["r"]
    assert +pool.references == {}


def test_what_was_settled_before_it_failed_needs_no_quarantine() -> None:
    waiting, pool, _ = inbound()
    waiting.expect("r", "push", ["a"])
    waiting.settle(Counter({"r": 1}))

    assert not waiting.failed("r")
    assert +pool.references == {}
    waiting.expect("r", "push", ["b"])
    assert waiting.failed("r"), "an earlier request under the same id settles nothing of this one"


def test_a_failure_of_what_is_not_awaited_changes_nothing() -> None:
    waiting, pool, _ = inbound()
    assert not waiting.failed("never-heard-of")
    assert waiting.settle(Counter({"never-heard-of": 1})) == []
    assert +pool.references == {}


def test_each_request_is_overdue_once_a_deadline_and_never_after_it_arrived() -> None:
    waiting, _, clock = inbound()
    waiting.expect("slow", "push", ["a"])
    clock.now += 2
    waiting.expect("later", "pull", ["b"])
    waiting.expect("quick", "push", ["c"])
    waiting.arrived("quick")

    clock.now += 3
    assert [request_id for request_id, _ in waiting.overdue()] == ["slow"]
    assert [request_id for request_id, _ in waiting.overdue()] == []
    clock.now += 3
    assert [request_id for request_id, _ in waiting.overdue()] == ["later"]
    clock.now += 2
    assert [request_id for request_id, _ in waiting.overdue()] == ["slow"]
