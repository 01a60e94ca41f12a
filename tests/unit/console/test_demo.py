"""`kvtop demo` says what is missing before it starts anything, and its parts do what they promise."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvtop.agents.model import Transfer
from kvtop.console.cli import run
from kvtop.console.demo import preflight
from kvtop.console.demo.figures import as_text, client_figures, ledger_figures
from kvtop.console.demo.load import OUTPUT_TOKENS, PROMPT_TOKENS, Outcome, make_prompt
from kvtop.console.demo.model import make_model
from kvtop.console.demo.ports import HOST, Ports, free_ports
from kvtop.console.demo.processes import DemoError, Processes, ProcessFailed
from tests.support.waiting import wait_until

PATIENT = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
STUBBORN = [sys.executable, "-c", DEAF + "time.sleep(600)"]


class TestPreflight:
    def test_without_vllm_it_says_how_to_get_it_and_offers_the_simulation(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)

        assert run(["demo", "--headless"]) == 1

        said = capsys.readouterr().err
        assert "vLLM is not installed" in said
        assert "make demo" in said
        assert "--simulate" in said

    def test_too_little_memory_is_named_with_what_is_needed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(preflight, "available_bytes", lambda: 3 << 30)

        assert run(["demo", "--headless"]) == 1

        assert "2 vLLM servers need 6.9 GiB of memory and 3.0 GiB are available" in capsys.readouterr().err

    def test_a_containers_memory_limit_counts(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
        limit.write_text("1000000\n")
        used.write_text("400000\n")
        monkeypatch.setattr(preflight, "CGROUP_LIMIT", limit)
        monkeypatch.setattr(preflight, "CGROUP_USED", used)

        assert preflight.available_bytes() == 600_000

    def test_a_port_in_use_is_named_with_its_purpose(self, capsys: pytest.CaptureFixture[str]) -> None:
        ports = free_ports()
        with socket.create_server((HOST, ports.ssh)):
            assert run(["demo", "--simulate", "--headless", "--port-base", str(ports.base)]) == 1

        assert f"port {ports.ssh} (for the agent's SSH) is in use" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ([], "needs a terminal"),
            (["--json"], "go with --headless"),
            (["--requests", "3"], "go with --headless"),
            (["--headless", "--requests", "0"], "--requests"),
            (["--headless", "--rate", "0"], "--rate"),
            (["--headless", "--mode", "sideways"], "--mode"),
        ],
    )
    def test_options_that_make_no_sense_are_usage_errors(
        self, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["demo", *arguments]) == 2
        assert told in capsys.readouterr().err


class TestProcesses:
    def test_ends_processes_their_orphans_and_those_that_ignore_being_asked(self) -> None:
        orphan = f"import subprocess, sys; print(subprocess.Popen({PATIENT!r}, start_new_session=True).pid)"
        with Processes() as processes:
            patient = processes.start("patient", PATIENT)
            stubborn = processes.start("stubborn", STUBBORN)
            parent = processes.start("parent", [sys.executable, "-c", orphan])
            wait_until(lambda: processes.exit_code("parent") == 0, "the orphan to be started")
            wait_until(lambda: "deaf" in stubborn.tail(), "the stubborn process to ignore SIGTERM")
            pids = [patient.pid, stubborn.pid, int(parent.tail())]
            assert all(psutil.pid_exists(pid) for pid in pids)
            folder = processes.folder

        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not folder.exists()

    def test_a_killed_guardian_does_not_keep_anything_from_being_ended(self) -> None:
        processes = Processes().open()
        pid = processes.start("patient", PATIENT).pid
        guardian = psutil.Process(pid).parent()
        assert guardian is not None
        guardian.kill()

        processes.close()

        wait_until(lambda: not psutil.pid_exists(pid), "the process to end")
        assert not processes.folder.exists()

    def test_a_process_that_ends_is_told_with_the_end_of_its_log(self) -> None:
        with Processes() as processes:
            processes.start("failing", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
            wait_until(lambda: processes.exit_code("failing") == 3, "it to end")
            with pytest.raises(ProcessFailed, match=r"(?s)failing ended with exit code 3.*no such model"):
                processes.check("failing")

    def test_a_command_that_cannot_be_run_is_named(self) -> None:
        with Processes() as processes, pytest.raises(DemoError, match="missing cannot be started"):
            processes.start("missing", ["/no/such/command"])

    def test_the_folder_is_private_and_can_be_kept(self) -> None:
        with Processes(keep=True) as processes:
            assert processes.folder.stat().st_mode & 0o777 == 0o700
        assert processes.folder.exists()
        subprocess.run(["rm", "-r", str(processes.folder)], check=True)

    def test_an_owner_that_is_killed_leaves_nothing(self) -> None:
        code = (
            "import os, signal; from kvtop.console.demo.processes import Processes\n"
            f"p = Processes().open(); print(p.start('patient', {PATIENT!r}).pid, p.folder, flush=True)\n"
            f"os.kill(os.getpid(), {signal.SIGKILL:d})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        pid, folder = done.stdout.split()

        wait_until(lambda: not psutil.pid_exists(int(pid)), "the process to end")
        wait_until(lambda: not Path(folder).exists(), "the folder to go")


class TestModel:
    def test_the_same_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        pytest.importorskip("tokenizers")
        weights = [
            (make_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
            for name, seed in (("a", 1), ("b", 1), ("c", 2))
        ]
        assert weights[0] == weights[1] != weights[2]

    def test_a_byte_is_a_token(self, tmp_path: Path) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        tokenizer = tokenizers.Tokenizer.from_file(str(make_model(tmp_path) / "tokenizer.json"))
        text = "KV cache – 90 °C"
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


class TestLoad:
    def test_prompts_are_of_mixed_length_and_share_no_beginning(self) -> None:
        source = random.Random(0)
        prompts = [make_prompt(number, source) for number in range(500)]
        lengths = [len(prompt.text) for prompt in prompts]
        assert PROMPT_TOKENS[0] <= min(lengths) < 100
        assert 1500 < max(lengths) <= PROMPT_TOKENS[1]
        assert all(OUTPUT_TOKENS[0] <= prompt.max_tokens <= OUTPUT_TOKENS[1] for prompt in prompts)
        assert len({prompt.text.split()[0] for prompt in prompts}) == len(prompts)


class TestFigures:
    def test_the_client_counts_failures_and_measures_what_went_well(self) -> None:
        good = Outcome(ok=True, ttft_s=0.2, itl_s=[0.01, 0.03], output_tokens=3)
        figures = client_figures([good, Outcome(error="boom"), Outcome(error="boom")])
        assert figures == {
            "ok": 1,
            "failed": 2,
            "errors": ["boom"],
            "ttft_s": {"count": 1, "p50": 0.2, "p99": 0.2},
            "itl_s": {"count": 2, "p50": 0.01, "p99": 0.03},
        }

    def test_the_ledgers_sums_are_unknown_as_soon_as_one_part_is(self) -> None:
        def row(number: int, size: int | None) -> Transfer:
            return Transfer(
                id=number, direction="push", stage="done", stage_since_ns=0, first_seen_ns=0, bytes=size
            )

        assert ledger_figures([row(1, 10), row(2, 20)])["bytes"] == 30
        assert ledger_figures([row(1, 10), row(2, None)])["bytes"] is None

    def test_what_is_unknown_is_no_zero(self) -> None:
        figures = {
            "mode": "push",
            "simulated": True,
            "client": client_figures([]),
            "transfers": ledger_figures([Transfer(id=1, stage="done", stage_since_ns=0, first_seen_ns=0)]),
            "startup_s": {"total": 1.0},
        }
        text = as_text(figures)
        assert "SIMULATED" in text
        assert "moved        – bytes in – descriptors" in text
        assert "TTFT         p50 –, p99 –" in text


def test_ports_of_one_deployment_do_not_overlap() -> None:
    ports = Ports(20_000)
    taken = list(ports.all().values())
    assert len(set(taken)) == len(taken)


def test_simulated_figures_come_over_ssh(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--simulate", "--headless", "--requests", "3", "--rate", "20", "--json"]) == 0

    figures = json.loads(capfd.readouterr().out)
    assert figures["simulated"] is True
    assert figures["client"] is None
    assert figures["transfers"]["done"] + figures["transfers"]["failed"] >= 3
