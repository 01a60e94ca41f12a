"""P's side of a push, step by step: nothing is ever posted after D was told that nothing will come.

The state machine is the product's; upstream's posting and the handshakes are played by the test. Real
transfers are in `tests/real`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from queue import SimpleQueue
from typing import Any

import pytest

from kvtop.connector.outbox import drain
from kvtop.connector.peer_messages import Drop, Failed, Peer, PeerMessage, Read, Settled
from kvtop.connector.refusals import Refusals
from kvtop.connector.telemetry import Telemetry
from kvtop.connector.upstream import NixlPushConnectorWorker
from kvtop.connector.writing import Writing

pytestmark = pytest.mark.vllm

BLOCKS = ([1, 2],)
D = Peer("decode-engine", "10.0.0.2", 5600, 1)


class Writer(Writing):
    """The writer of a P that has met D, unless a test says otherwise."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.told: list[PeerMessage] = []
        self.met = True
        self._take_part()
        self._telemetry = Telemetry(None)
        self._handshake_lock = threading.RLock()
        self._remote_agents = {D.engine_id: {(0, 0): "kvtop1-of-d"}}
        self._push_finished_blocks: dict[str, Any] = {}
        self._pending_d_registrations: dict[str, Any] = {}
        self._sending_transfers: dict[str, list[int]] = {}
        self._send_failures: set[str] = set()
        self.tp_rank, self.world_size = 0, 1

    def shutdown(self) -> None:
        """There is nothing to end."""

    def hold(self, request_id: str) -> None:
        """P has computed a prompt."""
        self._held.add(request_id)
        self._match_blocks(request_id, BLOCKS)

    def register(self, request_id: str) -> None:
        """D has told where to write."""
        registration = {
            "request_id": request_id,
            "decode_engine_id": D.engine_id,
            "decode_host": D.host,
            "decode_port": D.port,
            "decode_tp_size": 1,
            "local_block_ids": [[7, 8]],
        }
        refusal = self._refusals.of_prefill(_base(request_id))
        if refusal is not None:
            self._tell_failed(registration, refusal.error_class, refusal.reason, settled=True)
            return
        match = self._pop_matching_finished_blocks(request_id)
        if match is None:
            self._pending_d_registrations[request_id] = registration
        else:
            self._do_start_push_kv(match[0], match[1], registration)

    def meet(self) -> None:
        """The handshake with D ends well, and what waited for it goes on."""
        self.met = True
        for push in list(self.waiting):
            self._do_start_push_kv(push.request_id, push.blocks, push.registration)

    def _awaits_handshake(self, push: Any) -> bool:
        if not self.met:
            self.waiting.append(push)
        return not self.met

    def _beyond_end(self, registration: dict[str, Any]) -> int | None:
        del registration
        return None

    def _tell(self, registration: dict[str, Any], message: PeerMessage) -> None:
        del registration
        self.told.append(message)

    def _take_part(self) -> None:
        """What `Writing.observe` sets up, without upstream's worker under it."""
        self.waiting: list[Any] = []
        self._outbox = SimpleQueue()
        self._guard = threading.Lock()
        self._stats_guard = threading.Lock()
        self._held: set[str] = set()
        self._posting: set[str] = set()
        self._for_readers: set[str] = set()
        self._pushes: dict[str, Any] = {}
        self._finished = OrderedDict()
        self._refusals = Refusals()
        self._released = SimpleQueue()
        self.pull_port = 5650


def _base(request_id: str) -> str:
    return request_id.rpartition("-")[0]


P_ID, D_ID = "cmpl-1-aaaaaaaa", "cmpl-1-bbbbbbbb"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    made = Writer()

    def post(self: Writer, request_id: str, blocks: Any, registration: Any) -> None:
        del blocks, registration
        self.posted.append(request_id)
        self._sending_transfers[request_id] = [1]

    monkeypatch.setattr(NixlPushConnectorWorker, "_do_start_push_kv", post)
    return made


def test_blocks_and_a_registration_meet_in_either_order(writer: Writer) -> None:
    writer.hold(P_ID)
    writer.register(D_ID)
    writer.register("cmpl-2-bbbbbbbb")
    writer.hold("cmpl-2-aaaaaaaa")
    assert writer.posted == [P_ID, "cmpl-2-aaaaaaaa"]


def test_nothing_is_posted_once_d_was_told_that_nothing_comes(writer: Writer) -> None:
    """D drops while P shakes hands with it; then the handshake ends, and the blocks are not freed yet."""
    writer.met = False
    writer.hold(P_ID)
    writer.register(D_ID)
    writer._obey_drop(Drop(D_ID, "the client left"))
    assert writer.told == [Settled(D_ID)]

    writer.meet()

    assert writer.posted == []
    assert list(drain(writer._released)) == [P_ID]


def test_nothing_is_posted_after_the_lease(writer: Writer) -> None:
    writer.met = False
    writer.hold(P_ID)
    writer.register(D_ID)
    writer._held.discard(P_ID)  # as the engine's thread does when it frees the blocks
    writer._refuse(P_ID, "expiry", "the lease ended")

    writer.meet()

    assert writer.posted == []
    (told,) = writer.told
    assert isinstance(told, Failed)
    assert (told.error_class, told.settled) == ("expiry", True)


def test_a_registration_that_comes_after_an_abort_is_answered_at_once(writer: Writer) -> None:
    writer._refuse(P_ID, "cancel", "aborted on P")
    writer.register(D_ID)
    assert writer.told == [Failed(D_ID, "cancel", "aborted on P", settled=True)]


def test_a_drop_under_a_write_is_settled_by_its_end_and_not_before(writer: Writer) -> None:
    writer.hold(P_ID)
    writer.register(D_ID)
    writer._obey_drop(Drop(D_ID, "too late", reply_to=D))
    assert writer.told == []
    assert list(drain(writer._outbox)) == []
    assert writer._pushes[D_ID].dropped


def test_a_drop_that_comes_before_the_blocks_frees_them_when_they_come(writer: Writer) -> None:
    writer._obey_drop(Drop(D_ID, "the client left", reply_to=D))
    assert list(drain(writer._outbox)) == [(D, Settled(D_ID))]

    writer.hold(P_ID)

    assert writer.posted == []
    assert list(drain(writer._released)) == [P_ID]


def test_a_cancel_on_p_tells_d_whether_a_write_may_still_come(writer: Writer) -> None:
    writer.hold(P_ID)
    writer.register(D_ID)
    writer._cancel(P_ID, "cancel", "by an operator")
    assert writer.told == [Failed(D_ID, "cancel", "by an operator", settled=False)]
    assert list(drain(writer._released)) == [], "they are being written from"


def test_blocks_that_a_reader_may_be_reading_are_not_freed_by_a_cancel(writer: Writer) -> None:
    writer._for_readers.add(P_ID)
    writer.hold(P_ID)
    writer._cancel(P_ID, "cancel", "by an operator")
    assert list(drain(writer._released)) == []


def test_a_registration_for_what_is_meant_to_be_read_is_answered_with_its_blocks(writer: Writer) -> None:
    writer._for_readers.add(P_ID)
    writer.hold(P_ID)
    writer.register(D_ID)
    assert writer.posted == []
    assert writer.told == [Read(D_ID, P_ID, [[1, 2]], 5650)]
    assert P_ID in writer._push_finished_blocks, "held until it is read"


def test_a_stock_peer_is_written_to_whatever_p_had_meant(writer: Writer) -> None:
    writer._remote_agents = {D.engine_id: {(0, 0): "6f0c8d7e-upstreams-own"}}
    writer._for_readers.add(P_ID)
    writer.hold(P_ID)
    writer.register(D_ID)
    assert writer.posted == [P_ID]
