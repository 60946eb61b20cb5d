"""The sentences that `quipu explain` makes of an explanation (`web/cli/explanation_sentences.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.block_manager import MissReason
from quipu.web.cli.explanation_sentences import MAX_SHOWN, REASONS, sentences

ENDED = {"reason": "evicted", "token": 1117, "message": 0, "part": 2, "diverged_from": None}
PROMPT = {
    "prompt_tokens": 1357,
    "cached_tokens": 1104,
    "lost_to_rounding": 13,
    "blocks": [
        {"start": 0, "end": 80, "source": "reused", "tier": "device"},
        {"start": 80, "end": 1104, "source": "reused", "tier": "host"},
        {"start": 1104, "end": 1357, "source": "computed", "tier": None},
    ],
    "messages": [
        {"index": 0, "role": "system", "start": 0, "end": 1205},
        {"index": None, "role": "assistant", "start": 1205, "end": 1357},
    ],
    "ended": ENDED | {"evicted": {"at": 1.0, "by": "req-b", "idle_s": 12.4}},
    "advice": [{"code": "pool_too_small", "text": "Give the cache 64 blocks."}],
}
USAGE = {"prompt_tokens": 1357, "cached_tokens": 1104, "restored_tokens": 1, "recomputed_tokens": 32}
EXPLANATION = {"request_id": "req-a", "state": "closed", "usage": USAGE, "prompts": [PROMPT]}


def test_sentences() -> None:
    """The sentences have the numbers, the place counted from 1, the reason, each message's sources, and advice."""
    assert list(sentences(EXPLANATION)) == [
        "Request req-a had 1,357 tokens in its prompt, of which 1,104 (81%) came from the cache.",
        "1 token was found in the cache after an interruption.",
        "32 tokens were computed again after an interruption, or on another engine.",
        "The cached part ends at token 1,117, in message 1 (system), part 3.",
        REASONS["evicted"],
        "Request req-b took its place.",
        "It had not been used for 12 s.",
        "13 tokens more were the same, but did not fill a block.",
        "  message 1, system: 80 tokens reused, 1,024 tokens loaded from the host, 101 tokens computed",
        "  assistant, no message of its own: 152 tokens computed",
        "Advice: Give the cache 64 blocks.",
    ]


def test_adapter_is_named() -> None:
    """An adapter is named with its model."""
    first, second, *_ = sentences(EXPLANATION | {"model": "sql", "adapter": "0f3a", "parent": "demo"})
    assert first.startswith("Request req-a had 1,357 tokens")
    assert second == "It was computed with the adapter sql of demo."


def test_zero_and_unknown_differ() -> None:
    """Zero cached tokens are shown as 0, an unknown count is not."""
    (zero,) = sentences({"request_id": "r", "usage": {"prompt_tokens": 5, "cached_tokens": 0}})
    (unknown,) = sentences({"request_id": "r", "usage": {"prompt_tokens": 5, "cached_tokens": None}})
    assert "of which 0 (0%) came from the cache" in zero
    assert unknown.endswith("how many of them were cached is not known.")


def test_every_reason_has_a_sentence() -> None:
    """There is a sentence for each reason that an engine can give."""
    assert set(REASONS) == {"nothing", *(reason.value for reason in MissReason)}


def test_nothing_cached() -> None:
    """If not even the first token is cached, the sentence says so, and names no token 0."""
    ended = {"reason": "diverged", "token": 0, "message": 0, "part": None, "diverged_from": None}
    lines = list(sentences({"usage": {"prompt_tokens": 47, "cached_tokens": 0}, "prompts": [{"ended": ended}]}))
    assert lines[1:] == [REASONS["nothing"]]


@pytest.mark.parametrize(
    "answer",
    [
        [],
        None,
        {},
        {"usage": [], "prompts": {}},
        {"prompts": [None, 3, {"ended": 7, "blocks": [1], "messages": [{"start": "x"}], "advice": ["\x1b[31m"]}]},
        {"usage": {"prompt_tokens": True, "cached_tokens": -1}, "request_id": "\x1b]0;x\x07" * 1000},
        {"prompts": [{"ended": {"reason": ["x"], "token": 1e9, "evicted": {"idle_s": "x"}}}] * 100},
    ],
)
def test_any_answer_is_printed_safely(answer: Any) -> None:
    """Another server's answer prints no control characters, and no more than a terminal can take."""
    lines = list(sentences(answer))
    assert all(line.isprintable() and len(line) < MAX_SHOWN + 200 for line in lines) and len(lines) < 400
