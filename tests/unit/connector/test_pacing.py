"""An engine that only holds blocks for a peer rests between steps, and is woken for each."""

from __future__ import annotations

import threading

from kvtop.connector.pacing import PACE_S, Pacer


class Loop:
    def __init__(self, *, can_rest: bool = True) -> None:
        self.can_rest = can_rest
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_rests_after_a_step_and_is_woken_for_the_next() -> None:
    loop, clock = Loop(), Clock()
    pacer = Pacer(loop, clock)
    pacer.stepped()

    assert not pacer.due()
    assert loop.woken.wait(5)

    clock.now += PACE_S
    assert pacer.due()
    pacer.stepped()
    assert not pacer.due()


def test_it_is_woken_again_each_time() -> None:
    loop, clock = Loop(), Clock()
    pacer = Pacer(loop, clock)

    for _ in range(3):
        loop.woken.clear()
        pacer.stepped()
        assert not pacer.due()
        assert loop.woken.wait(5)
        clock.now += PACE_S


def test_an_engine_that_would_end_instead_of_resting_does_not_rest() -> None:
    pacer = Pacer(Loop(can_rest=False), Clock())
    pacer.stepped()

    assert pacer.due()
