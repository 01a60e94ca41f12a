"""What there is to say of an instance beside its figures: its quarantine, and the peers that it cannot meet.

The tables of `kvtop status` and `kvtop-agent status` and the Fleet screen show the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from kvtop.agents.model import Instance
from kvtop.agents.text import age, plural

PAIRS_TOLD: Final = 2
"""Most failed pairs of one instance that get a line each."""
PAIR_TOLD_S: Final = 3600.0
"""For how long a failed pair is told of. It is reported anew with each attempt; what nobody has tried since,
such as a peer that another has replaced, stays in the JSON."""

Kind = Literal["quarantine", "pair"]
AgeOf = Callable[[int | None], float | None]
"""Returns the seconds since a stamp of the instance's node, None where the stamp is not known."""


class Remark(NamedTuple):
    """One line about an instance: a text with an age in it."""

    kind: Kind
    before: str
    since_ns: int | None
    """On the node's CLOCK_MONOTONIC."""
    after: str

    def text(self, age_s: AgeOf) -> str:
        """Return the line as of now."""
        seconds = age_s(self.since_ns)
        return self.before + ("–" if seconds is None else age(seconds)) + self.after


def remarks(of: Instance, name_of: Callable[[str], str], age_s: AgeOf) -> list[Remark]:
    """Return the lines about an instance, none where there is nothing to say.

    `name_of` returns the name of an engine id, or the id where that engine is not known.
    """
    lines = []
    if of.quarantined_blocks:
        blocks = f"quarantine: {plural(of.quarantined_blocks, 'block')}, the oldest for "
        lines.append(Remark("quarantine", blocks, of.quarantined_since_ns, ""))
    failed = [(age_s(each.since_ns) or 0.0, each) for each in of.pairs if each.state == "failed"]
    recent = sorted((each for each in failed if each[0] <= PAIR_TOLD_S), key=lambda each: each[0])
    more = len(recent) - PAIRS_TOLD
    for number, (_, pair) in enumerate(recent[:PAIRS_TOLD], 1):
        others = f" and {more} more (status --json)" if number == PAIRS_TOLD and more > 0 else ""
        reason = f"pair {name_of(pair.engine_id)}{others}: {pair.reason or 'failed'} ("
        lines.append(Remark("pair", reason, pair.since_ns, " ago)"))
    return lines
