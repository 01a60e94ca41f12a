"""What an operator types on a node, and what its engines do: `kvtop-agent` against a real agent process."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time

import pytest

from kvtop.agents.events import EngineStats, TransferEvent
from kvtop.agents.runtime import RuntimePaths
from tests.support.acting import AGENT_CLI, ActingNode, live
from tests.support.agent import await_snapshot, hello, reporting, snapshot
from tests.support.waiting import wait_until

# Targets


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("drain", "nobody"),
            "no instance is called 'nobody'; this agent knows sim-decode-0, sim-decode-1, sim-",
        ),
        (("mode", "nobody", "push"), "no instance is called 'nobody'"),
        (
            ("evict", "sim-prefill-0", "nobody"),
            "sim-prefill-0 knows no peer 'nobody'; it may be one of: sim-",
        ),
        (("mode", "sim-prefill-0", "push", "--peer", "nobody"), "sim-prefill-0 knows no peer 'nobody'"),
        (("mode", "sim-prefill-0", "sideways"), "'sideways' is not one of 'push', 'pull'"),
        (("mode", "sim-prefill-0"), "Missing argument"),
        (("drain",), "Missing argument"),
        (("cancel",), "Missing argument"),
        (("drain", "sim-prefill-0", "--timeout", "soon"), "'soon' is no time span"),
        (("drain", "sim-prefill-0", "--timeout", "0s"), "'0s' is no time span"),
        (("drain", "sim-prefill-0", "--timeout", "25h"), "'25h' is no time span"),
        (("drain", "x" * 600), "a name has at most 512 characters"),
        (("evict", "sim-prefill-0"), "Missing argument"),
    ],
)
def test_what_cannot_be_understood_is_said_and_nothing_is_done(
    quiet_node: ActingNode, arguments: tuple[str, ...], said: str
) -> None:
    done = quiet_node.act(*arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert not any(each.draining for each in snapshot(quiet_node.paths).instances)


def test_an_engine_id_names_an_instance_too(quiet_node: ActingNode) -> None:
    engine_id = quiet_node.instance("sim-prefill-0").engine_id

    assert quiet_node.act("drain", engine_id).stdout == "sim-prefill-0: drained\n"


def test_a_name_that_two_instances_have_is_not_guessed(quiet_node: ActingNode) -> None:
    twins = [hello("twin", engine_id=f"twin-{number}", pid=os.getpid()) for number in range(2)]
    with (
        reporting(quiet_node.paths, start_agent=False, hello=twins[0]),
        reporting(quiet_node.paths, start_agent=False, hello=twins[1]),
    ):
        done = quiet_node.act("drain", "twin")

    assert done.returncode == 2
    assert "'twin' is the name of 2 instances: name one by its engine id: twin-0 (pid" in done.stderr
    assert "twin-1" in done.stderr


def test_an_instance_that_only_reports_is_not_ordered_anything(quiet_node: ActingNode) -> None:
    with reporting(quiet_node.paths, start_agent=False, hello=hello("observed")) as reporter:
        reporter.put(EngineStats(at_ns=1, running=0, waiting=0, kv_usage=0.0))
        reporter.put(TransferEvent(at_ns=time.monotonic_ns(), side="prefill", request_id="r", step="queued"))
        seen = await_snapshot(quiet_node.paths, live, "its transfer")
        drain = quiet_node.act("drain", "observed", "--force")
        cancel = quiet_node.act("cancel", str(live(seen)[0].id))

    assert (drain.returncode, cancel.returncode) == (1, 1)
    assert "refused: observed takes no orders, it only reports" in drain.stderr
    assert "refused: no side of it can be told" in cancel.stderr


# Engines that do not answer


def test_an_engine_that_is_stopped_is_said_not_to_have_answered(quiet_node: ActingNode) -> None:
    quiet_node.engines.suspend()

    done = quiet_node.act("drain", "sim-prefill-0", "--timeout", "1s")

    assert done.returncode == 4
    assert "the engine did not answer: it is stopped, or in a long step (waited 1 s; " in done.stderr
    quiet_node.engines.resume()
    await_snapshot(
        quiet_node.paths,
        lambda seen: any(each.draining for each in seen.instances),
        "the order to take effect, as was said",
    )


def test_an_engine_that_dies_before_it_answers_is_not_waited_for(quiet_node: ActingNode) -> None:
    quiet_node.engines.suspend()
    waiting = quiet_node.start("undrain", "sim-prefill-0")
    wait_until(lambda: quiet_node.paths.audit.exists() and quiet_node.audit(), "the order")
    began_s = time.monotonic()
    quiet_node.engines.kill()

    _, told = waiting.communicate(timeout=30)

    assert time.monotonic() - began_s < 8  # an answer would be awaited for 10 s
    assert waiting.returncode == 1
    assert "detached before it answered" in told


def test_an_engine_that_is_gone_has_nothing_to_order(quiet_node: ActingNode) -> None:
    quiet_node.engines.kill()
    await_snapshot(quiet_node.paths, lambda s: {each.state for each in s.instances} == {"down"}, "their end")

    done = quiet_node.act("drain", "sim-prefill-0")

    assert done.returncode == 1
    assert "refused: sim-prefill-0 is down" in done.stderr


# Without an agent


def test_without_an_agent_nothing_can_be_ordered(paths: RuntimePaths) -> None:
    done = subprocess.run(
        [*AGENT_CLI, "--runtime-dir", str(paths.folder), "drain", "prefill-0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert done.returncode == 3
    assert "no agent runs in" in done.stderr


def test_an_agent_that_ends_meanwhile_leaves_that_unsaid_to_nobody(slow_node: ActingNode) -> None:
    await_snapshot(slow_node.paths, lambda seen: len(live(seen)) > 3, "leases")
    waiting = slow_node.start("drain", "sim-prefill-0", "--force", "--wait")
    await_snapshot(slow_node.paths, lambda seen: seen.instances[0].draining, "the drain")

    slow_node.agent.terminate()

    _, told = waiting.communicate(timeout=30)
    assert waiting.returncode in (1, 3)
    assert "stays in force" in told or "may be in force" in told
    assert "stays in force" in slow_node.audit()[-1]["message"]


# What is asked and what is recorded


def test_a_dry_run_does_nothing(quiet_node: ActingNode) -> None:
    done = quiet_node.act_json("drain", "sim-prefill-0", "--dry-run", "--wait")

    assert (done["exit_code"], done["state"]) == (0, "planned")
    assert done["plan"]["targets"] == ["sim-prefill-0"]
    assert not quiet_node.instance("sim-prefill-0").draining


def test_everything_is_recorded_refusals_and_dry_runs_too(quiet_node: ActingNode) -> None:
    quiet_node.act("drain", "sim-prefill-0")
    quiet_node.act("drain", "sim-prefill-1")
    quiet_node.act("undrain", "sim-prefill-0", "--dry-run")
    quiet_node.act("drain", "nobody")

    records = quiet_node.audit()

    assert [(each["event"], each["verb"], each.get("state")) for each in records] == [
        ("started", "drain", None),
        ("ended", "drain", "done"),
        ("ended", "drain", "refused"),
        ("ended", "undrain", "planned"),
        ("ended", "drain", "usage"),
    ]
    first = records[1]
    assert first["uid"] == os.getuid()
    assert f"pid {os.getpid()}" not in first["source"]
    assert "kvtop" in first["source"] or "cli.py" in first["source"]
    assert first["targets"] == ["sim-prefill-0"]
    (outcome,) = first["outcomes"]
    assert (outcome["before"]["draining"], outcome["after"]["draining"]) == (False, True)
    assert stat.S_IMODE(quiet_node.paths.audit.stat().st_mode) == 0o600


def test_a_record_that_cannot_be_written_stops_nothing_and_is_told(quiet_node: ActingNode) -> None:
    quiet_node.paths.audit.mkdir()

    people = quiet_node.act("drain", "sim-prefill-0")
    scripts = quiet_node.act_json("undrain", "sim-prefill-0")

    assert people.returncode == 0
    assert "not recorded: " in people.stderr
    assert (scripts["exit_code"], scripts["audited"]) == (0, False)
    assert "cannot be written" in scripts["audit_problem"]


def test_a_command_that_comes_again_under_its_key_is_not_run_again(quiet_node: ActingNode) -> None:
    first = quiet_node.act_json("drain", "sim-prefill-0", "--key", "change-7")
    assert quiet_node.act("undrain", "sim-prefill-0").returncode == 0

    again = quiet_node.act_json("drain", "sim-prefill-0", "--key", "change-7")

    assert (first["repeated"], again["repeated"]) == (False, True)
    assert again["message"] == first["message"]
    assert not quiet_node.instance("sim-prefill-0").draining
    assert [each["event"] for each in quiet_node.audit()].count("started") == 2
    other = quiet_node.act("drain", "sim-prefill-1", "--key", "change-7")
    assert other.returncode == 2
    assert "the key 'change-7' was another command's" in other.stderr


def test_who_comes_again_while_it_runs_waits_for_the_same_outcome(slow_node: ActingNode) -> None:
    await_snapshot(slow_node.paths, lambda seen: len(live(seen)) > 3, "leases")
    command = ("drain", "sim-prefill-0", "--force", "--wait", "--key", "once", "--json")
    both = [slow_node.start(*command) for _ in range(2)]
    outcomes = [json.loads(process.communicate(timeout=60)[0]) for process in both]

    assert [each["state"] for each in outcomes] == ["done", "done"]
    assert sorted(each["repeated"] for each in outcomes) == [False, True]
    assert [each["event"] for each in slow_node.audit()].count("started") == 1
