"""The admission middleware: while its instance drains, an API server takes no new generation request.

Load it with vLLM's `--middleware kvtop.connector.admission.Admission`. Routers then see 503 with Retry-After
and move on, and a readiness probe sees `GET /kvtop/ready` turn 503; accepted requests go on to their end.
Draining itself is the engine's (`kvtop.connector.control`): without this middleware an instance that
drains still serves, only without KV transfers.

It knows of draining through the stat logger, which lives in the same process and takes the agent's orders.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

OPTION: Final = "--middleware kvtop.connector.admission.Admission"
RETRY_AFTER_S: Final = 5
READY_PATH: Final = "/kvtop/ready"
GENERATING: Final = ("/v1/", "/v2/", "/inference/", "/generative_scoring", "/invocations", "/generate")
"""How the paths begin to which clients POST what an engine must compute; new routes come under these."""
OTHER: Final = (
    "/abort_requests",
    "/cancel",
    "/count_tokens",
    "/derender",
    "/load_lora_adapter",
    "/render",
    "/unload_lora_adapter",
)
"""How those among them end that compute nothing."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_draining: dict[str, bool] = {}
loaded = False
"""Whether an API server in this process has the middleware."""


def set_draining(engine_id: str, *, draining: bool) -> None:
    """Take note that one of this API server's engines drains, or serves again."""
    _draining[engine_id] = draining


def drains() -> bool:
    """Whether all engines of this API server drain: while one of them serves, requests go to that one."""
    return bool(_draining) and all(_draining.values())


def told() -> str:
    """Say for operators what becomes of new requests now."""
    if not any(_draining.values()):
        return "new requests are taken"
    if not loaded:
        return f"new requests are still taken: the admission middleware is not loaded ({OPTION})"
    if not drains():
        return "new requests are still taken until the other engines of its API server drain too"
    return "new requests get 503"


def generates(method: str, path: str) -> bool:
    """Whether a request asks an engine to compute.

    >>> [generates("POST", each) for each in ("/v1/completions", "/v1/responses/7/cancel", "/tokenize")]
    [True, False, False]
    >>> generates("GET", "/v1/models")
    False
    """
    return method == "POST" and path.startswith(GENERATING) and not path.endswith(OTHER)


class Admission:
    """ASGI middleware. Whatever goes wrong in it, requests pass."""

    def __init__(self, app: App) -> None:
        """Stand in front of `app`."""
        global loaded
        self._app = app
        loaded = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is refused, and the readiness probe; pass on everything else."""
        answer = _answer(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        status, body = answer
        headers = [(b"content-type", b"application/json")]
        if status == 503:
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _answer(scope: Scope) -> tuple[int, dict[str, Any]] | None:
    """Return status and body of what is answered here, None for what passes."""
    if scope.get("type") != "http":
        return None
    path, method = str(scope.get("path", "")), str(scope.get("method", ""))
    if path == READY_PATH and method in ("GET", "HEAD"):
        return (503, {"ready": False, "reason": "draining"}) if drains() else (200, {"ready": True})
    if not (drains() and generates(method, path)):
        return None
    message = f"this instance drains and takes no new requests: try another, or again in {RETRY_AFTER_S} s"
    return 503, {"error": {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}}
