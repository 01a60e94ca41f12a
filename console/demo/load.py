"""The demo's load: streamed completions at a settable rate, and what a client sees of their latency.

Run as a process of its own (`python -m kvtop.console.demo.load`), so that drawing the console does not
disturb the clock it measures with. It prints one JSON line for each request that ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtop.console.demo.servers import MODEL_NAME

if TYPE_CHECKING:
    import aiohttp

PROMPT_TOKENS: Final = (32, 2048)
"""Shortest and longest prompt; lengths are spread evenly over the orders of magnitude between."""
OUTPUT_TOKENS: Final = (8, 48)
MAX_IN_FLIGHT: Final = 16
"""Requests are held back beyond this many: the rate is what is offered, not what must be endured."""
REQUEST_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Prompt:
    """One request to send; a byte of text is a token."""

    text: str
    max_tokens: int


@dataclass
class Outcome:
    """How one request went, as its client saw it. Durations in seconds."""

    ok: bool = False
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)


def make_prompt(number: int, random_: random.Random) -> Prompt:
    """Return a prompt that shares no beginning with any other, so that no prefix cache answers it."""
    low, high = PROMPT_TOKENS
    length = int(math.exp(random_.uniform(math.log(low), math.log(high))))
    words = " ".join(f"{random_.getrandbits(32):x}" for _ in range(length // 8 + 1))
    return Prompt(f"{number:x} {words}"[:length], random_.randint(*OUTPUT_TOKENS))


async def send(session: aiohttp.ClientSession, url: str, prompt: Prompt) -> Outcome:
    """Send one streamed completion and measure it. Never raises for a failed request: the outcome says."""
    import aiohttp  # noqa: PLC0415 - comes with vLLM; nothing else needs it

    outcome = Outcome(prompt_tokens=len(prompt.text))
    body = {
        "model": MODEL_NAME,
        "prompt": prompt.text,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    sent = last = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for tokens in _token_counts(response):
                now = time.monotonic()
                if outcome.ttft_s is None:
                    outcome.ttft_s = now - sent
                else:
                    outcome.itl_s.append(now - last)
                last = now
                outcome.output_tokens += tokens
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    outcome.ok = outcome.output_tokens == prompt.max_tokens
    if not outcome.ok:
        outcome.error = f"{outcome.output_tokens} of {prompt.max_tokens} tokens arrived"
    return outcome


async def _token_counts(response: aiohttp.ClientResponse) -> AsyncIterator[int]:
    """Yield how many tokens each event of the stream brought, for events that brought any.

    Raises:
        ValueError: the stream reports an error instead of tokens.
    """
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "choices" not in event:
            raise ValueError(f"the server answered {data.decode(errors='replace')[:200]}")
        if tokens := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
            yield tokens


async def run(url: str, rate_per_s: float, requests: int | None, seed: int) -> None:
    """Offer `rate_per_s` requests a second (Poisson), for ever or until `requests` have ended."""
    import aiohttp  # noqa: PLC0415

    random_ = random.Random(seed)
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    number = 0
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):

        async def one(prompt: Prompt) -> None:
            try:
                outcome = await send(session, url, prompt)
            finally:
                slots.release()
            sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
            sys.stdout.flush()

        while requests is None or number < requests:
            await slots.acquire()
            group.create_task(one(make_prompt(number, random_)))
            number += 1
            await asyncio.sleep(random_.expovariate(rate_per_s))


def main() -> None:
    """Run the load that the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--requests", type=int, help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(run(given.url, given.rate, given.requests, given.seed))


if __name__ == "__main__":
    main()
