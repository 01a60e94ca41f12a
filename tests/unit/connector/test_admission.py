"""While an instance drains, its API server refuses what would have to be computed, and nothing else."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvtop.agents.orders import SetDraining
from kvtop.connector import admission
from kvtop.connector.admission import Admission, Receive, Scope, Send, set_draining

GENERATION = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/a-route-that-vllm-has-not-yet",
    "/inference/v1/generate",
    "/invocations",
    "/generative_scoring",
]
OTHERS = [
    "/tokenize",
    "/detokenize",
    "/v1/completions/render",
    "/v1/responses/resp_7/cancel",
    "/v1/messages/count_tokens",
    "/inference/v1/abort_requests",
    "/scale_elastic_ep",
    "/ping",
]


@pytest.fixture(autouse=True)
def nobody_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_draining", {})


async def server(scope: Scope, receive: Receive, send: Send) -> None:
    """An API server that accepts everything."""
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


async def ask(method: str, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(Admission(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        return await client.request(method, path)


@pytest.mark.parametrize("path", GENERATION)
async def test_new_generation_requests_are_refused_with_a_time_to_come_back(path: str) -> None:
    assert (await ask("POST", path)).status_code == 200
    set_draining("e", draining=True)

    refused = await ask("POST", path)

    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert "drains" in refused.json()["error"]["message"]
    set_draining("e", draining=False)
    assert (await ask("POST", path)).text == "served"


@pytest.mark.parametrize("path", OTHERS)
async def test_what_computes_nothing_is_served_throughout(path: str) -> None:
    set_draining("e", draining=True)
    assert (await ask("POST", path)).text == "served"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/version"])
async def test_health_and_metrics_stay_up(path: str) -> None:
    set_draining("e", draining=True)
    assert (await ask("GET", path)).text == "served"


async def test_the_readiness_probe_turns_with_draining() -> None:
    assert (await ask("GET", "/kvtop/ready")).json() == {"ready": True}

    set_draining("e", draining=True)
    probed = await ask("GET", "/kvtop/ready")

    assert probed.status_code == 503
    assert probed.json() == {"ready": False, "reason": "draining"}


async def test_a_server_of_several_engines_refuses_only_when_all_of_them_drain() -> None:
    set_draining("e/0", draining=True)
    set_draining("e/1", draining=False)
    assert (await ask("POST", "/v1/completions")).status_code == 200

    set_draining("e/1", draining=True)
    assert (await ask("POST", "/v1/completions")).status_code == 503


def test_operators_are_told_what_becomes_of_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "loaded", True)
    set_draining("e/0", draining=False)
    set_draining("e/1", draining=False)
    assert admission.told() == "new requests are taken"

    set_draining("e/0", draining=True)
    assert admission.told() == (
        "new requests are still taken until the other engines of its API server drain too"
    )
    set_draining("e/1", draining=True)
    assert admission.told() == "new requests get 503"

    monkeypatch.setattr(admission, "loaded", False)
    assert admission.told() == (
        "new requests are still taken: the admission middleware is not loaded "
        "(--middleware kvtop.connector.admission.Admission)"
    )


@pytest.mark.vllm
def test_an_engine_that_was_ordered_nothing_counts_among_those_that_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With data parallelism a drain of one engine must not turn away the requests of the others."""
    from kvtop.connector import stat_logger
    from kvtop.connector.telemetry import Telemetry

    answers: list[tuple[int, str]] = []
    monkeypatch.setattr(admission, "loaded", True)
    monkeypatch.setattr(stat_logger, "telemetry_for", lambda *_: Telemetry(None))
    monkeypatch.setattr(
        Telemetry,
        "answer",
        lambda _self, order_id, *, ok, message: answers.append((order_id, message)),
    )
    transfer = SimpleNamespace(
        engine_id="e", kv_connector_extra_config={}, has_connector=lambda name: name == "KvtopConnector"
    )
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    first, second = (stat_logger.KvtopStatLogger(config, index) for index in range(2))

    first.telemetry.take_order(SetDraining(1, True))
    second.telemetry.take_order(SetDraining(2, True))
    first.telemetry.take_order(SetDraining(3, False))

    assert answers == [
        (1, "new requests are still taken until the other engines of its API server drain too"),
        (2, "new requests get 503"),
        (3, "new requests are still taken until the other engines of its API server drain too"),
    ]


async def test_what_is_not_http_passes() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        seen.append(scope["type"])

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        del message

    set_draining("e", draining=True)
    for kind in ("lifespan", "websocket"):
        await Admission(app)({"type": kind}, receive, send)
    assert seen == ["lifespan", "websocket"]
