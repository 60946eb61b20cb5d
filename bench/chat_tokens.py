"""Measure what it costs to tokenise a chat that has grown by one turn: the whole chat, or only the new turn.

    python -m bench.chat_tokens [--json] [--quick] [--rounds 7] [--model FOLDER]

The same chat is encoded in three ways, alternately: `whole` renders it and encodes the text in one piece, as most
servers do; `first` is quipu's way with an empty cache, `next` with a cache that holds the previous turns. The ids must
be equal. Results are the best of the rounds, in milliseconds; each includes rendering the template.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import Library, load_library
from quipu.actors.tokenizer.chat_template import ChatTemplate
from quipu.actors.tokenizer.encoder import TooManyTokens, load_encoder
from quipu.actors.tokenizer.segment_cache import SegmentCache
from quipu.actors.tokenizer.template_source import TemplateSource, read_template
from quipu.web.cli.bench.prompts import WORDS

CHATS = ((2, 100), (8, 150), (40, 150), (40, 600))
"""Turns, and words of each."""
CACHE_BYTES = 64 << 20


def make_chat(num_turns: int, num_words: int, draw: random.Random) -> tuple[dict[str, str], ...]:
    """Return turns of random words, with a short question at the end."""
    turns = [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": " ".join(draw.choices(WORDS, k=num_words))}
        for turn in range(num_turns)
    ]
    return (*turns, {"role": "user", "content": "And what does the last knot say?"})


def measure_row(
    library: Library, source: TemplateSource, num_turns: int, num_words: int, rounds: int
) -> dict[str, Any]:
    """Measure one chat. Raises ValueError if the ids differ."""
    encoder, template = load_encoder(library), ChatTemplate(source.source, source.variables)
    chat = make_chat(num_turns, num_words, random.Random(num_turns * num_words))
    before, after = ChatPrompt(chat[:-2]), ChatPrompt(chat)

    def whole() -> list[int]:
        text = template.render(after).text
        return library.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(cache: SegmentCache) -> list[int]:
        encoded = encoder.encode_chat(template.render(after), (), cache, "bench")
        if isinstance(encoded, TooManyTokens):
            raise ValueError("a chat without a limit is too long")
        return encoded.token_ids

    best: dict[str, float] = {}
    ids: dict[str, list[int]] = {}
    for _ in range(rounds):
        seen = SegmentCache(CACHE_BYTES)
        encoder.encode_chat(template.render(before), (), seen, "bench")
        ways: dict[str, Callable[[], list[int]]] = {
            "whole": whole,
            "first": lambda: encode(SegmentCache(CACHE_BYTES)),
            "next": partial(encode, seen),
        }
        for name, way in ways.items():
            began_s = time.perf_counter()
            ids[name] = way()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - began_s)
    if not ids["whole"] == ids["first"] == ids["next"]:
        raise ValueError("the ids of a chat depend on what was cached")
    numbers = {f"{name}_ms": seconds * 1000 for name, seconds in best.items()}
    ratio = best["whole"] / best["next"]
    return {"num_turns": num_turns, "num_tokens": len(ids["whole"]), **numbers, "ratio": ratio}


def main() -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.chat_tokens", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: the shortest chats, one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint (default: the demo)")
    arguments = parser.parse_args()
    library, source = load_library(arguments.model), read_template(arguments.model)
    if source is None:
        parser.error("the checkpoint has no chat template")
    chats, rounds = (CHATS[:2], 1) if arguments.quick else (CHATS, arguments.rounds)
    rows = [measure_row(library, source, turns, words, rounds) for turns, words in chats]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'turns':>6} {'tokens':>8} {'whole ms':>9} {'first ms':>9} {'next ms':>9} {'ratio':>6}")
    for row in rows:
        times = " ".join(f"{row[name]:9.3f}" for name in ("whole_ms", "first_ms", "next_ms"))
        print(f"{row['num_turns']:>6} {row['num_tokens']:>8} {times} {row['ratio']:6.1f}")


if __name__ == "__main__":
    main()
