"""One HTTP answer, bounded in size and time whatever the server does."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 5.0
"""For all of an answer, from connecting to its last byte."""
MAX_BYTES: Final = 4 << 20


class Unreachable(Exception):
    """A server gave no answer that could be used; the message says why."""


def client() -> httpx.AsyncClient:
    """Return what fetches, for all servers. It heeds no proxy of the environment and no redirect."""
    import httpx  # noqa: PLC0415 - only to observe

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    return httpx.AsyncClient(
        timeout=TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),  # else servers that hang would keep others waiting
        follow_redirects=False,
        headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
    )


async def fetch(through: httpx.AsyncClient, url: str) -> str:
    """Return the body of an answer.

    Raises:
        Unreachable: there is none.
    """
    import httpx  # noqa: PLC0415

    try:
        async with asyncio.timeout(TIMEOUT_S), through.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise Unreachable(f"it answers {response.status_code} {response.reason_phrase}")
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_BYTES:
                    raise Unreachable(f"its answer has more than {MAX_BYTES} bytes")
    except (TimeoutError, httpx.TimeoutException) as error:
        raise Unreachable(f"it does not answer within {TIMEOUT_S:g} s") from error
    except httpx.ConnectError as error:
        raise Unreachable(f"nothing can be reached there: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error
    return body.decode("utf-8", "replace")
