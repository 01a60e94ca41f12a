"""A router's two steps, one at a time: so that a test can do something between them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvtop.console.demo.load import Prompt
from kvtop.console.demo.servers import MODEL_NAME, Server
from tests.support.pair import REQUEST_TIMEOUT_S, Completion, Turn, input_of

_NO_PEER = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@dataclass(frozen=True)
class Handed:
    """A prompt on its way through both steps, under one request id, as routers do it."""

    prompt: Prompt
    params: dict[str, Any] = field(default_factory=dict)
    """`kv_transfer_params` for D, once P has computed the prompt."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def but(self, **params: Any) -> Handed:
        """Return the same with other parameters for D."""
        return replace(self, params={**self.params, **params})


def prefill(server: Server, prompt: Prompt, **params: Any) -> Handed:
    """Have P compute a prompt and hold its KV."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, **_NO_PEER, **params}
    handed = Handed(prompt, wanted)
    return replace(handed, params=_post(server, handed, max_tokens=1)["kv_transfer_params"] or {})


def decode(server: Server, handed: Handed) -> Completion:
    """Have D complete a prompt with the KV that P holds."""
    return decode_and_keep(server, handed)[0]


def decode_and_keep(server: Server, handed: Handed) -> tuple[Completion, dict[str, Any]]:
    """Have D complete a prompt; return also what it tells about the KV that it keeps for another turn."""
    answer = _post(server, handed, max_tokens=handed.prompt.max_tokens)
    choice = answer["choices"][0]
    return Completion(tuple(choice["token_ids"]), choice["text"]), answer.get("kv_transfer_params") or {}


def next_turn(so_far: Turn, answer: Completion, more: Turn) -> Turn:
    """Return the conversation with an answer and what comes after it."""
    return Turn("", more.max_tokens, (*so_far.token_ids, *answer.token_ids, *more.token_ids))


def decode_and_leave(server: Server, handed: Handed, *, after_s: float) -> None:
    """Ask D to complete a prompt, and hang up while it has not answered."""
    try:
        _post(server, handed, max_tokens=handed.prompt.max_tokens, timeout_s=after_s)
    except httpx.ReadTimeout:
        return
    raise AssertionError(f"{server.name} answered before the client could leave")


def _post(
    server: Server, handed: Handed, *, max_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": input_of(handed.prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": handed.params or None,
    }
    headers = {"X-Request-Id": handed.request_id}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=timeout_s)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
