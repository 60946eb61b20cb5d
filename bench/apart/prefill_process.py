"""The engine for prefill of `python -m bench.apart --real`, in a process of its own: `FOLDER CORE TOKENS CARRIER`.

Reads a line with the secret of both engines, and writes a line of JSON with its address. Then it reads a prompt a line,
computes it, and writes when its first token came and which it was, until the input ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import trio


async def serve(folder: Path, num_tokens: int, carrier: str) -> None:
    from bench.apart.real_pair import config_of, network_of
    from bench.driven_engine import running

    network = network_of(carrier, bytes.fromhex(sys.stdin.readline()))
    async with running(config_of(folder, num_tokens), network) as engine:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the engine logs
        print(json.dumps({"address": engine.engine.ready(1).peer_address}), file=answers, flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            (served,) = await engine.ask(json.loads(line), max_tokens=2, ends_after_prefill=True)
            first_at = served.submitted_at + served.first_token_s
            print(json.dumps({"first_at": first_at, "token_ids": served.token_ids}), file=answers, flush=True)


def main() -> None:
    folder, core, num_tokens, carrier = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    trio.run(serve, Path(folder), int(num_tokens), carrier)


if __name__ == "__main__":
    main()
