"""A refusal outlives its request for as long as the other side may still ask, and no longer."""

from __future__ import annotations

from kvtop.connector.refusals import KEPT, KEPT_S, Refusal, Refusals

NOTHING_TO_GIVE = Refusal("expiry", "the lease ended", by_decode=False)
NOT_WANTED = Refusal("cancel", "the client left", by_decode=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_p_repeats_why_it_has_nothing_until_the_request_begins_again() -> None:
    refusals = Refusals()
    refusals.remember("r", NOTHING_TO_GIVE)

    assert refusals.of_prefill("r") == NOTHING_TO_GIVE
    assert refusals.of_prefill("r") == NOTHING_TO_GIVE
    refusals.begin("r")
    assert refusals.of_prefill("r") is None


def test_what_d_does_not_want_is_let_go_once_however_late_p_begins() -> None:
    refusals = Refusals()
    refusals.remember("r", NOT_WANTED)
    refusals.begin("r")

    assert refusals.of_prefill("r") is None
    assert refusals.take_of_decode("r") == NOT_WANTED
    assert refusals.take_of_decode("r") is None


def test_old_refusals_are_forgotten() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.remember("old", NOTHING_TO_GIVE)
    clock.now = KEPT_S + 1
    assert refusals.of_prefill("old") is None
    assert len(refusals) == 0


def test_their_number_is_bounded() -> None:
    refusals = Refusals()
    for number in range(KEPT + 10):
        refusals.remember(str(number), NOTHING_TO_GIVE)
    assert len(refusals) == KEPT
    assert refusals.of_prefill("0") is None
    assert refusals.of_prefill(str(KEPT)) == NOTHING_TO_GIVE
