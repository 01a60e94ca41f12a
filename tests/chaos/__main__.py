"""The full run: 1,000 requests, and a decode engine that is killed and started again in the middle.

make chaos ARGS="--seed 7 --requests 200"
"""

from __future__ import annotations

import argparse
import random
import sys

from kvtop.console.demo.load import make_prompt
from tests.chaos.storm import Storm, idle
from tests.support.pair import complete_all, kill, running_alone, running_pair, start_again
from tests.support.waiting import wait_until

CONNECTOR = "kvtop-impatient"
IDLE_TIMEOUT_S = 120.0


def main(arguments: list[str]) -> int:
    """Run one storm; print what was done and what came of it; return the exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Trouble a real pair.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args(arguments)
    source = random.Random(options.seed)
    prompts = [make_prompt(number, source) for number in range(options.requests)]
    print(f"seed {options.seed}: what {options.requests} requests answer without disaggregation", flush=True)
    with running_alone() as aggregated:
        expected = complete_all(aggregated.url, prompts, in_flight=4)
    with running_pair(CONNECTOR) as pair:

        def disaster() -> None:
            print("half of them are answered: killing the decode engine", flush=True)
            kill(pair, "decode")
            start_again(pair, "decode")
            print("another decode engine serves on its address", flush=True)

        summary = Storm(pair, options.seed).run(prompts, expected, disaster=disaster)
        print(summary, flush=True)
        try:
            wait_until(lambda: idle(pair), "KV use to return to 0", timeout_s=IDLE_TIMEOUT_S, poll_s=0.2)
        except AssertionError as error:
            print(f"KV is left in use: {error}: {list(pair.instances().values())}")
            return 1
    print("KV use of both engines: back to 0")
    return 1 if summary.wrong or summary.stuck else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
