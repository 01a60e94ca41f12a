"""Each acting verb on simulated engines: what it does, and what its outcome says."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import Any

import pytest

from kvtop.agents.model import Snapshot, Transfer
from kvtop.agents.simulated_request import LEASE_S
from tests.support.acting import ActingNode, live
from tests.support.agent import await_snapshot, snapshot
from tests.support.waiting import wait_until

# mode


def test_a_switch_is_proved_by_the_transfers_that_follow(node: ActingNode) -> None:
    await_snapshot(node.paths, lambda seen: len(seen.transfers) > 5, "some transfers to push")

    done = node.act_json("mode", "sim-prefill-0", "pull", "--wait", "--timeout", "30s")

    assert (done["exit_code"], done["state"]) == (0, "done")
    assert done["plan"]["simulated"] is True
    (target,) = done["targets"]
    assert (target["name"], target["before"]["mode"], target["after"]["mode"]) == (
        "sim-prefill-0",
        "push",
        "pull",
    )
    facts = done["facts"]
    assert (facts["mode_asked"], facts["old_mode_live"]) == ("pull", 0)
    proof = next(row for row in snapshot(node.paths).transfers if row.id == facts["proved_by_transfer"])
    assert (proof.direction, proof.stage) == ("pull", "done")
    assert node.instance("sim-prefill-0").mode == "pull"
    assert node.instance("sim-prefill-1").mode == "push"


def test_a_switch_without_wait_says_what_was_last_seen(quiet_node: ActingNode) -> None:
    done = quiet_node.act("mode", "sim-prefill-0", "pull")

    assert done.returncode == 0
    assert done.stdout == (
        "sim-prefill-0: new requests pull; 0 live transfers still push; the latest transfer seen: push\n"
    )
    assert "sim-prefill-0: requests that arrive from now on pull; now they push" in done.stderr


def test_a_switch_for_one_peer_says_that_only_requests_that_name_it_take_it(quiet_node: ActingNode) -> None:
    """Routers do not name D in what they send to P: the engine has obeyed, and nothing may change."""
    done = quiet_node.act("mode", "sim-prefill-0", "pull", "--peer", "sim-decode-0")

    assert done.returncode == 0
    assert done.stdout == (
        "sim-prefill-0: set for requests that name sim-decode-0: they pull; routers usually do not name it "
        "to P, so use --wait to see whether it has effect, or leave --peer out; 0 live transfers still push; "
        "the latest transfer seen: push\n"
    )
    assert "only requests that name sim-decode-0 take it: routers usually do not name it to P" in done.stderr


def test_a_switch_on_d_says_that_p_decides(quiet_node: ActingNode) -> None:
    for peer in ((), ("--peer", "sim-prefill-0")):
        done = quiet_node.act("mode", "sim-decode-0", "pull", *peer)

        assert done.returncode == 0
        assert (
            "but a decode request that comes with P's answer takes P's direction all the same" in done.stdout
        )
        assert "set it on P" in done.stdout


def test_who_waits_for_a_switch_is_told_that_traffic_did_not_take_it(node: ActingNode) -> None:
    """Simulated requests go P's way, as real ones do: an exception on D reaches none of them."""
    done = node.act("mode", "sim-decode-0", "pull", "--peer", "sim-prefill-0", "--wait", "--timeout", "3s")

    assert done.returncode == 4
    assert "no traffic came" not in done.stderr
    assert (
        "transfers first seen since did not take it: their requests came before the order, or" in done.stderr
    )


def test_a_switch_that_no_traffic_proves_says_so(quiet_node: ActingNode) -> None:
    done = quiet_node.act("mode", "sim-prefill-0", "pull", "--wait", "--timeout", "1s")

    assert done.returncode == 4
    assert "no traffic came to prove it" in done.stderr
    assert done.stdout == ""
    assert quiet_node.instance("sim-prefill-0").mode == "pull"


def test_a_switch_for_one_peer_leaves_the_others(node: ActingNode) -> None:
    decode = node.instance("sim-decode-0")

    done = node.act_json(
        "mode", "sim-prefill-0", "pull", "--peer", "sim-decode-0", "--wait", "--timeout", "30s"
    )

    assert done["exit_code"] == 0
    assert done["facts"]["peer"] == decode.engine_id
    prefill = node.instance("sim-prefill-0")
    assert (prefill.mode, prefill.peer_modes) == ("push", {decode.engine_id: "pull"})
    again = node.act_json("mode", "sim-prefill-0", "push")
    assert again["plan"]["irreversible"] == ["the exceptions that are forgotten"]
    assert node.instance("sim-prefill-0").peer_modes == {}


def test_who_waits_for_a_switch_is_told_that_another_has_undone_it(quiet_node: ActingNode) -> None:
    waiting = quiet_node.start("mode", "sim-prefill-0", "pull", "--wait")
    wait_until(lambda: quiet_node.instance("sim-prefill-0").mode == "pull", "the switch", poll_s=0.05)

    assert quiet_node.act("mode", "sim-prefill-0", "push").returncode == 0

    _, told = waiting.communicate(timeout=30)
    assert waiting.returncode == 1
    assert "failed: sim-prefill-0: another command made it push meanwhile" in told


# drain and undrain


def test_a_drain_tells_what_is_in_the_way_and_ends_when_nothing_is(node: ActingNode) -> None:
    await_snapshot(
        node.paths,
        lambda seen: any(each.blockers for each in seen.instances if each.name == "sim-prefill-0"),
        "something to wait for",
    )

    drained = node.act("drain", "sim-prefill-0", "--wait", "--timeout", "60s")

    assert (drained.returncode, drained.stdout) == (0, "sim-prefill-0: drained\n"), drained.stderr
    assert "sim-prefill-0 starts no new KV transfer from now on" in drained.stderr
    instance = node.instance("sim-prefill-0")
    assert (instance.state, instance.draining, instance.drained, instance.blockers) == (
        "drained",
        True,
        True,
        {},
    )
    begun = {row.id for row in snapshot(node.paths).transfers}
    await_snapshot(
        node.paths,
        lambda seen: len([row for row in seen.transfers if row.id not in begun]) > 5,
        "transfers of the others",
    )
    later = [row for row in snapshot(node.paths).transfers if row.id not in begun]
    assert {row.prefill.name for row in later if row.prefill} == {"sim-prefill-1"}

    undrained = node.act("undrain", "sim-prefill-0")

    assert (undrained.returncode, undrained.stdout) == (0, "sim-prefill-0: starts KV transfers again\n")
    assert node.instance("sim-prefill-0").state == "serving"
    await_snapshot(
        node.paths,
        lambda seen: any(row.prefill and row.prefill.name == "sim-prefill-0" for row in live(seen)),
        "its transfers to begin again",
    )


def test_a_drain_that_does_not_end_in_time_says_what_is_left(slow_node: ActingNode) -> None:
    await_snapshot(slow_node.paths, lambda seen: len(live(seen)) > 3, "leases")

    done = slow_node.act_json("drain", "sim-prefill-0", "--force", "--wait", "--timeout", "500ms")

    assert (done["exit_code"], done["state"]) == (4, "timed-out")
    assert "not drained after 0.5 s; left: " in done["message"]
    assert done["facts"]["left"]["sim-prefill-0"].keys() <= {"leases", "writes"}
    assert slow_node.instance("sim-prefill-0").draining
    people = slow_node.act("drain", "sim-prefill-0", "--wait", "--timeout", "30s")
    assert people.returncode == 0, people.stderr
    assert "leases" in people.stderr
    assert "transfer " in people.stderr


def test_the_last_one_of_a_role_is_drained_only_by_force(quiet_node: ActingNode) -> None:
    assert quiet_node.act("drain", "sim-prefill-0").returncode == 0

    refused = quiet_node.act("drain", "sim-prefill-1")

    assert refused.returncode == 1
    assert "refused: sim-prefill-1 is the last serving prefill instance that is known here" in refused.stderr
    assert not quiet_node.instance("sim-prefill-1").draining
    assert quiet_node.act("drain", "sim-prefill-1", "--dry-run").returncode == 1
    assert quiet_node.act("drain", "sim-prefill-1", "--force").returncode == 0
    assert quiet_node.instance("sim-prefill-1").draining


def test_all_of_a_role_at_once_are_its_last_ones_too(quiet_node: ActingNode) -> None:
    assert quiet_node.act("drain", "sim-prefill-0", "sim-prefill-1").returncode == 1
    assert quiet_node.act("drain", "sim-prefill-0", "sim-decode-1").returncode == 0
    assert {each.name for each in snapshot(quiet_node.paths).instances if each.draining} == {
        "sim-prefill-0",
        "sim-decode-1",
    }


def test_two_operators_do_not_drain_the_last_two_together(quiet_node: ActingNode) -> None:
    both = [quiet_node.start("drain", f"sim-prefill-{number}", "--wait") for number in range(2)]
    for process in both:
        process.communicate(timeout=60)

    assert sorted(process.returncode for process in both) == [0, 1]
    assert [each.draining for each in snapshot(quiet_node.paths).instances].count(True) == 1


def test_who_waits_is_told_that_another_has_undone_it(slow_node: ActingNode) -> None:
    await_snapshot(slow_node.paths, lambda seen: len(live(seen)) > 3, "leases")
    waiting = slow_node.start("drain", "sim-prefill-0", "--force", "--wait")
    await_snapshot(slow_node.paths, lambda seen: seen.instances[0].draining, "the drain")

    assert slow_node.act("undrain", "sim-prefill-0").returncode == 0

    _, told = waiting.communicate(timeout=30)
    assert waiting.returncode == 1
    assert "failed: sim-prefill-0: another command undrained it meanwhile" in told


def test_ctrl_c_leaves_the_order_in_force_and_says_so(slow_node: ActingNode) -> None:
    await_snapshot(slow_node.paths, lambda seen: len(live(seen)) > 3, "leases")
    waiting = slow_node.start("drain", "sim-prefill-0", "--force", "--wait", "--json")
    await_snapshot(slow_node.paths, lambda seen: seen.instances[0].draining, "the drain")
    assert waiting.stderr is not None
    while "left: " not in waiting.stderr.readline():
        pass

    waiting.send_signal(signal.SIGINT)

    out, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    document = json.loads(out)
    assert document["state"] == "interrupted"
    assert "stays in force; `undrain sim-prefill-0` takes it back" in document["message"]
    assert slow_node.instance("sim-prefill-0").draining
    wait_until(
        lambda: [record["state"] for record in slow_node.audit() if record["event"] == "ended"] == ["done"],
        "the agent to record how it ended all the same",
        timeout_s=30,
    )


# cancel


def test_a_cancelled_transfer_ends_on_both_sides(slow_node: ActingNode) -> None:
    seen = await_snapshot(slow_node.paths, _waiting_for_lease, "a transfer that waits")
    row = _waiting_for_lease(seen)[-1]

    done = slow_node.act_json("cancel", str(row.id))

    assert (done["exit_code"], done["facts"]) == (0, {"cancelled": 1, "asked": 1})
    (target,) = done["targets"]
    assert (target["before"]["stage"], target["after"]["stage"]) == (row.stage, "cancelled")
    assert "sim-decode-0: simulated: cancelled" in done["message"]
    assert "sim-prefill-0: simulated: cancelled" in done["message"]
    ended = next(each for each in snapshot(slow_node.paths).transfers if each.id == row.id)
    assert (ended.stage, ended.error_class) == ("cancelled", "cancel")


def _waiting_for_lease(seen: Snapshot) -> list[Transfer]:
    """Transfers of which both sides have reported, and that only wait for their short lease to end."""
    return [
        row
        for row in live(seen)
        if row.stage == "queued"
        and row.decode
        and row.decode.request_id
        and (row.lease_deadline_ns or 0) - row.first_seen_ns < LEASE_S * 1e9
    ]


def test_of_several_transfers_each_has_its_own_outcome(slow_node: ActingNode) -> None:
    seen = await_snapshot(
        slow_node.paths,
        lambda s: _waiting_for_lease(s) and [row for row in s.transfers if row.stage == "failed"],
        "a transfer that waits and one that has ended",
    )
    ended = next(row for row in seen.transfers if row.stage == "failed")
    waiting = _waiting_for_lease(seen)[-1]

    done = slow_node.act_json("cancel", str(ended.id), str(waiting.id))

    assert (done["exit_code"], done["facts"]) == (1, {"cancelled": 1, "asked": 2})
    assert [target["ok"] for target in done["targets"]] == [False, True]
    assert f"transfer {ended.id}: it has ended already (failed)" in done["message"]
    refused = slow_node.act("cancel", str(ended.id))
    assert refused.returncode == 1
    assert "nothing to cancel" in refused.stderr


@pytest.mark.parametrize("wrong", ["999999", "one", "-1", "1" * 30, "٣"])
def test_a_transfer_that_is_not_there_is_named_with_those_that_are(
    quiet_node: ActingNode, wrong: str
) -> None:
    done = quiet_node.act("cancel", "--", wrong)

    assert done.returncode == 2
    assert f"there is no transfer {wrong!r} here (any more); live ones: none" in done.stderr


# evict


def test_an_evicted_peer_is_met_afresh(node: ActingNode) -> None:
    decode = node.instance("sim-decode-0").engine_id

    def state() -> str:
        pairs = node.instance("sim-prefill-0").pairs
        return next((each.state for each in pairs if each.engine_id == decode), "unknown")

    wait_until(lambda: state() == "ready", "the pair to be ready", poll_s=0.1)

    tried: list[dict[str, Any]] = []

    def evicted() -> bool:
        tried.append(node.act_json("evict", "sim-prefill-0", "sim-decode-0"))
        return bool(tried[-1]["exit_code"] == 0)

    began_ns = time.monotonic_ns()
    wait_until(evicted, "a moment without a write between them", timeout_s=30)

    done = tried[-1]
    assert done["facts"]["pair_before"] == "ready"
    assert done["facts"]["peer"] == decode
    wait_until(lambda: state() == "ready", "the pair to be ready again", poll_s=0.1)
    await_snapshot(
        node.paths,
        lambda seen: any(
            "handshaking" in row.times_ns for row in seen.transfers if row.first_seen_ns > began_ns
        ),
        "a handshake",
    )


def test_of_a_peer_that_was_never_met_nothing_is_kept_either(quiet_node: ActingNode) -> None:
    done = quiet_node.act("evict", "sim-prefill-0", "sim-decode-1")

    assert done.returncode == 0
    assert "sim-prefill-0: simulated: forgotten: the next request handshakes afresh" in done.stdout


def test_an_eviction_is_planned_as_it_is_refused_while_transfers_are_under_way(node: ActingNode) -> None:
    """D waits for its peer's writes nearly all the time under this load."""
    refused: list[subprocess.CompletedProcess[str]] = []

    def refuses() -> bool:
        refused.append(node.act("evict", "sim-decode-0", "sim-prefill-0"))
        return refused[-1].returncode == 1

    wait_until(refuses, "a refusal", timeout_s=30)

    why = "transfers with it, or a handshake, are under way: cancel them or try again"
    assert f"sim-decode-0: simulated: {why}" in refused[-1].stderr
    assert f"the engine refuses it while {why}; now there" in refused[-1].stderr
    assert "requests that this touches: 0" in refused[-1].stderr
