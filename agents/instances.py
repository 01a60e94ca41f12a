"""The instances of this node: what their processes say of themselves, and what their silence means."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvtop.agents.events import Direction, EngineHello, EngineStats, InstanceReport
from kvtop.agents.exits import ExitWatch, sentence
from kvtop.agents.facts import Exit, ProcessStats
from kvtop.agents.host import Watched, status_of
from kvtop.agents.latency import NS, LatencyWindow
from kvtop.agents.ledger import Ledger, Tally
from kvtop.agents.model import Gap, Instance, InstanceState
from kvtop.agents.text import counted

STALE_AFTER_S: Final = 5.0
"""A live process sends something every second (`reporter.HEARTBEAT_S`)."""
RATE_WINDOW_S: Final = 10.0
GAPS_KEPT: Final = 20
GONE_KEPT: Final = 32
"""How many instances that are gone stay on show, the latest to go."""


@dataclass
class Attachment:
    """One process of an instance, attached or remembered."""

    record: InstanceRecord
    hello: EngineHello
    heard_ns: int
    attached: bool = True
    stopping: bool = False
    dropped: int = 0
    send: Callable[[msgspec.Struct], bool] | None = None
    """Queues a frame for the process; False where it takes no more. None once it is detached."""
    watch: ExitWatch = field(kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether the process is gone, or has said that it goes."""
        return not self.attached and (self.stopping or not self.watch.runs)

    @property
    def silence(self) -> str:
        """Why it says nothing."""
        if not self.attached:
            return f"{self.label} lost its connection"
        if status_of(self.watch.pid) in ("stopped", "tracing-stop"):
            return f"{self.label} is stopped (by a signal or a debugger; kill -CONT lets it go on)"
        return f"{self.label} sends nothing"

    @property
    def label(self) -> str:
        """For people: `engine-core (pid 12)`."""
        return f"{self.hello.process} (pid {self.hello.pid})"


class RateWindow:
    """Bytes per wall-clock second over the last `RATE_WINDOW_S`: overlapping transfers add up."""

    def __init__(self) -> None:
        self._moved: deque[tuple[int, int]] = deque()

    def add(self, at_ns: int, count: int) -> None:
        """Take `count` bytes that had arrived at `at_ns`."""
        self._moved.append((at_ns, count))

    def per_s(self, now_ns: int) -> float:
        """Return the rate in bytes per second."""
        while self._moved and self._moved[0][0] < now_ns - int(RATE_WINDOW_S * NS):
            self._moved.popleft()
        return sum(count for _, count in self._moved) / RATE_WINDOW_S


@dataclass
class InstanceRecord:
    """What is known of one instance (one incarnation of an engine)."""

    newest: EngineHello
    processes: dict[int, Attachment] = field(default_factory=dict)
    """By pid."""
    state: InstanceState = "starting"
    state_since_ns: int = 0
    state_reason: str = ""
    load: EngineStats | None = None
    report: InstanceReport | None = None
    reporting_pid: int = 0
    """The process that sent `report`."""
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    sent: RateWindow = field(default_factory=RateWindow)
    received: RateWindow = field(default_factory=RateWindow)
    gaps: deque[Gap] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    gone: bool = False
    exit: Exit | None = None

    def make_way_for(self, hello: EngineHello) -> None:
        """Forget the processes that a new one replaces.

        Where `engine_id` is configured, an engine that was started anew comes back under its old one; its
        earlier processes then say nothing about this instance any more.
        """
        if self.gone:
            self.close()
            self.processes.clear()
            self.exit = None
            return
        for pid, each in list(self.processes.items()):
            if not each.attached and (each.hello.process, each.hello.rank) == (hello.process, hello.rank):
                each.watch.close()
                del self.processes[pid]

    def close(self) -> None:
        """Watch its processes no more."""
        for each in self.processes.values():
            each.watch.close()

    @property
    def mode(self) -> Direction:
        """The direction that holds, as far as is known."""
        return self.report.mode if self.report else self.newest.mode

    @property
    def blockers(self) -> dict[str, int]:
        """What keeps the instance from being drained."""
        counts = self.report.blockers if self.report else {}
        return {blocker: count for blocker, count in counts.items() if count}

    @property
    def draining(self) -> bool:
        """Whether it starts no new transfer."""
        return self.report is not None and self.report.draining

    @property
    def drained(self) -> bool:
        """Whether it drains and no transfer keeps it any more."""
        return self.draining and not self.blockers

    def takers(self, kind: str | None = None) -> list[Attachment]:
        """Return the attached processes that take orders, of this kind if one is named."""
        return [
            each
            for each in self.processes.values()
            if each.send is not None and (kind in each.hello.orders if kind else each.hello.orders)
        ]

    def enter(self, state: InstanceState, at_ns: int, reason: str = "") -> None:
        """Change state, remembering since when and why."""
        if (state, reason) != (self.state, self.state_reason):
            since_ns = at_ns if state != self.state else self.state_since_ns
            self.state, self.state_since_ns, self.state_reason = state, since_ns, reason

    def note_gap(self, gap: Gap) -> None:
        """Remember a gap; one that overlaps the last of its kind widens it."""
        last = self.gaps[-1] if self.gaps else None
        if last and last.reason == gap.reason and gap.from_ns <= last.to_ns:
            counts = [count for count in (last.dropped_events, gap.dropped_events) if count is not None]
            gap = Gap(
                min(last.from_ns, gap.from_ns),
                max(last.to_ns, gap.to_ns),
                gap.reason,
                sum(counts) if counts else None,
            )
            self.gaps.pop()
        self.gaps.append(gap)


class Instances:
    """All instances that attached to this agent, by engine id."""

    def __init__(self, ledger: Callable[[], Ledger], *, engine_logs: bool = True) -> None:
        """Begin empty; `ledger` is asked for what it counts for each instance."""
        self.records: dict[str, InstanceRecord] = {}
        self.stats: dict[int, ProcessStats] = {}
        """The latest sample of the processes, by the pid that they have here."""
        self.observed: Callable[[], list[Instance]] = list
        """Returns the instances that do not attach but are read."""
        self._engine_logs = engine_logs
        self._ledger = ledger

    def name_of(self, engine_id: str) -> str:
        """Return an instance's name, or its engine id where it never attached here."""
        record = self.records.get(engine_id)
        return record.newest.name if record else engine_id

    def attached(self, engine_id: str) -> bool:
        """Whether an instance reports here."""
        record = self.records.get(engine_id)
        return record is not None and not record.gone

    def attach(
        self,
        hello: EngineHello,
        now_ns: int,
        send: Callable[[msgspec.Struct], bool] | None = None,
        *,
        seen_pid: int | None = None,
    ) -> Attachment:
        """Take a process's hello. A new incarnation under a known name replaces the old one.

        `send` queues a frame for the process, and returns False where it takes no more. `seen_pid` is the pid
        that the kernel says it has here, 0 where it cannot be seen: in another pid namespace it differs from
        the one in its hello.
        """
        record = self.records.get(hello.engine_id)
        if record is None:
            record = self.records[hello.engine_id] = InstanceRecord(hello, state_since_ns=now_ns)
            self._ledger().rename(hello.engine_id)
        before = record.processes.get(hello.pid)
        if before is None:
            record.make_way_for(hello)
        if record.reporting_pid not in record.processes:
            record.report = None  # what held in an engine ends with its process
        record.newest, record.gone = hello, False
        record.exit = None
        pid = hello.pid if seen_pid is None else seen_pid
        if before is None or before.watch.pid != pid or not before.watch.runs:
            watch = ExitWatch(pid, no_logs=self._no_logs(hello), ended=lambda: self._on_end(record))
        else:
            watch = before.watch
        attachment = record.processes[hello.pid] = Attachment(
            record, hello, now_ns, dropped=hello.dropped_events, send=send, watch=watch
        )
        if hello.previous_agent_lost_ns is not None:
            lost = hello.dropped_events - before.dropped if before else 0  # else the total tells of no gap
            reason = "no agent took its reports"
            record.note_gap(Gap(hello.previous_agent_lost_ns, now_ns, reason, lost if lost > 0 else None))
        self._judge(record, now_ns)
        self._forget_gone()
        return attachment

    def _no_logs(self, hello: EngineHello) -> str:
        """Return why a process's log is not looked at; empty where it is."""
        if hello.simulated:
            return "it is simulated"
        return "" if self._engine_logs else "the agent runs with --no-engine-logs"

    def _forget_gone(self) -> None:
        """Drop instances that are gone: those whose name another has taken, and all but the latest few."""
        present = {record.newest.name for record in self.records.values() if not record.gone}
        gone = [(engine_id, record) for engine_id, record in self.records.items() if record.gone]
        gone.sort(key=lambda each: each[1].state_since_ns)
        for position, (engine_id, record) in enumerate(gone):
            if record.newest.name in present or position < len(gone) - GONE_KEPT:
                record.close()
                del self.records[engine_id]

    def heard(self, attachment: Attachment, dropped_events: int, now_ns: int) -> None:
        """Take note that a process sent something."""
        if dropped_events > attachment.dropped:
            lost = dropped_events - attachment.dropped
            attachment.record.note_gap(Gap(attachment.heard_ns, now_ns, "its event ring was full", lost))
            attachment.dropped = dropped_events
        attachment.heard_ns = now_ns

    def detach(self, attachment: Attachment, now_ns: int) -> None:
        """Take note that a process's connection ended."""
        attachment.attached, attachment.send = False, None
        self._judge(attachment.record, now_ns)

    def refresh(self, now_ns: int) -> None:
        """Judge every instance anew, as time passes."""
        for record in self.records.values():
            for each in record.processes.values():
                each.watch.sample()
            self._judge(record, now_ns)
        self._forget_gone()

    def watched(self) -> list[Watched]:
        """Return the processes that are to be sampled."""
        return [
            Watched(each.watch.pid, each.hello.process, each.hello.rank)
            for record in self.records.values()
            for each in record.processes.values()
            if not record.gone and each.attached and each.watch.pid
        ]

    def _on_end(self, record: InstanceRecord) -> None:
        """Judge an instance at the moment at which one of its processes ended."""
        self._judge(record, time.monotonic_ns())

    def _judge(self, record: InstanceRecord, now_ns: int) -> None:
        """Derive an instance's state from its processes."""
        processes = list(record.processes.values())
        lost = [each for each in processes if each.ended]
        crashed = min((each for each in lost if not each.stopping), key=_ended_ns, default=None)
        if len(lost) == len(processes) or crashed:
            self._bury(record, crashed, now_ns)
            return
        record.gone = False
        silent = [
            each
            for each in processes
            if not each.stopping and now_ns - each.heard_ns > int(STALE_AFTER_S * NS) and each not in lost
        ]
        if silent:
            quietest = min(silent, key=lambda each: each.heard_ns)
            record.enter("stale", quietest.heard_ns, quietest.silence)
        elif record.load or any(each.hello.process == "api-server" for each in processes):
            self._serve(record, now_ns)
        else:
            record.enter("starting", now_ns, "its API server has not attached yet")

    def _serve(self, record: InstanceRecord, now_ns: int) -> None:
        if not record.draining:
            record.enter("serving", now_ns)
        elif record.drained:
            record.enter("drained", now_ns)
        else:
            record.enter("draining", now_ns, f"left: {counted(record.blockers)}")

    def take(self, attachment: Attachment, report: InstanceReport, now_ns: int) -> None:
        """Take what a process says holds in its engine."""
        record = attachment.record
        record.report, record.reporting_pid = report, attachment.hello.pid
        self._judge(record, now_ns)

    def _bury(self, record: InstanceRecord, crashed: Attachment | None, now_ns: int) -> None:
        last = crashed or max(record.processes.values(), key=_ended_ns)
        if record.exit is None and not last.watch.runs:  # what stops in order may take its time to end
            record.exit = last.watch.exit(last.label, in_order=last.stopping, now_ns=now_ns)
        reason = sentence(record.exit) if record.exit else "shut down in order"
        record.enter("down" if crashed else "stopped", now_ns, reason)
        if record.gone:
            return
        record.gone = True
        record.load = record.report = None
        self._ledger().engine_gone(record.newest.engine_id, now_ns, f"{record.newest.name}: {reason}")

    def freeze(self, now_ns: int) -> list[Instance]:
        """Return all instances as values for consoles, ordered by role and name."""
        frozen = [self._freeze(record, now_ns) for record in self.records.values()]
        frozen += self.observed()
        return sorted(frozen, key=lambda each: (each.role != "prefill", each.role, each.name))

    def _freeze(self, record: InstanceRecord, now_ns: int) -> Instance:
        hello, load, report = record.newest, record.load, record.report
        tally = self._ledger().tallies.get(hello.engine_id) or Tally()
        return Instance(
            engine_id=hello.engine_id,
            name=hello.name,
            role=hello.role,
            mode=record.mode,
            state=record.state,
            state_since_ns=record.state_since_ns,
            state_reason=record.state_reason,
            simulated=hello.simulated,
            model=hello.model,
            software=hello.software,
            pids=sorted(record.processes),
            tp_size=hello.tp_size,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            kv_usage=load.kv_usage if load else None,
            stage_depths={stage: count for stage, count in tally.depths.items() if count},
            sent_bytes_per_s=record.sent.per_s(now_ns),
            received_bytes_per_s=record.received.per_s(now_ns),
            rate_window_s=RATE_WINDOW_S,
            transfers_done=tally.done,
            transfers_failed={reason: count for reason, count in tally.failed.items() if count},
            oldest_live_ns=self._ledger().oldest_live_ns(hello.engine_id),
            latency=record.latency.freeze(now_ns),
            dropped_events=sum(each.dropped for each in record.processes.values()),
            gaps=list(record.gaps),
            peer_modes=report.peer_modes if report else {},
            draining=record.draining,
            drained=record.drained,
            blockers=record.blockers,
            quarantined_blocks=report.quarantined_blocks if report else None,
            quarantined_since_ns=report.quarantined_since_ns if report else None,
            pairs=report.pairs if report else [],
            orders=sorted({kind for each in record.takers() for kind in each.hello.orders}),
            processes=self._stats_of(record),
            exit=record.exit,
        )

    def _stats_of(self, record: InstanceRecord) -> list[ProcessStats]:
        """Return the samples of an instance's processes."""
        pids = sorted({each.watch.pid for each in record.processes.values() if each.attached})
        return [self.stats[pid] for pid in pids if pid in self.stats]


def _ended_ns(process: Attachment) -> float:
    """When a process ended, as far as the kernel said so."""
    return process.watch.ended_ns or float("inf")
