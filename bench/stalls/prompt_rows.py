"""Rows that have the server show the tokens of large prompts, or the text of many tokens, or generate in the shapes of
other servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.stalls.row_parts import MEBIBYTE, Row, chat, one, said, text_of

TOKENIZE, DETOKENIZE, RENDER = "/tokenize", "/detokenize", "/v1/chat/completions/render"

GENERATE, LLAMA, INFILL = "/generate", "/completion", "/infill"
_GAP = {"input_prefix": "x = ", "n_predict": 1}


def _generated(prompt: dict[str, Any], num_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    return prompt | {"sampling_params": {"max_new_tokens": num_tokens, "n": fields.pop("n", 1)}} | fields


def _mixed(prompt: Any, num_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": num_tokens, "stream": True} | fields


PROMPT_ROWS: Sequence[Row] = (
    Row("tokens of 4 MB", one(TOKENIZE, lambda: {"prompt": text_of(4 * MEBIBYTE)}, 4), concurrency=4),
    Row(
        "tokens of 2 MB, with names",
        one(TOKENIZE, lambda: {"prompt": text_of(2 * MEBIBYTE), "return_token_strs": True}, 4),
        concurrency=4,
    ),
    Row("tokens of a chat of 4 MB", one(TOKENIZE, lambda: chat([said(text_of(4 * MEBIBYTE))]), 4), concurrency=4),
    Row("rendered chat of 2 MB", one(RENDER, lambda: chat([said(text_of(2 * MEBIBYTE))]), 4), concurrency=4),
    Row(
        "rendered, 10,000 messages",
        one(RENDER, lambda: chat([said("Hello.") for _ in range(10_000)]), 4),
        concurrency=4,
    ),
    Row("text of a million tokens", one(DETOKENIZE, lambda: {"tokens": [67] * 1_000_000}, 4), concurrency=4),
    Row("generate from a million ids", one(GENERATE, lambda: _generated({"input_ids": [7] * 1_000_000}))),
    Row("generate from 512 texts", one(GENERATE, lambda: _generated({"text": [text_of(4000)] * 512}))),
    Row(
        "generate, many sampling fields",
        one(GENERATE, lambda: {"text": "Hi.", "sampling_params": {f"x{at}": at for at in range(400_000)}}),
    ),
    Row(
        "generate 300 tokens in 16 streams that repeat",
        one(GENERATE, lambda: _generated({"text": "Hi."}, 300, n=16, stream=True, return_logprob=True), 4),
        concurrency=4,
    ),
    Row("llama.cpp: texts among a million ids", one(LLAMA, lambda: _mixed([7, "Hi."] * 250 + [7] * 1_000_000))),
    Row("llama.cpp: 512 texts of 8 KB beside ids", one(LLAMA, lambda: _mixed([7] + [text_of(8000)] * 512), 4), 4),
    Row("llama.cpp: 300 tokens in 16 streams", one(LLAMA, lambda: _mixed("Hi.", 300, n_cmpl=16, n_probs=20), 4), 4),
    Row(
        "llama.cpp: 512 ends that repeat long settings",
        one(LLAMA, lambda: _mixed(["Hi."] * 4, 2, n_cmpl=128, stop=["x" * 4096] * 16), 2),
        concurrency=2,
    ),
    Row("llama.cpp: gap in 8 MB", one(INFILL, lambda: _GAP | {"input_suffix": text_of(8 * MEBIBYTE)}, 4), 4),
    Row(
        "gaps of 512 texts before 100 KB",
        one("/v1/completions", lambda: {"prompt": ["x = "] * 512, "suffix": text_of(100_000), "max_tokens": 1}, 4),
        concurrency=4,
    ),
    Row(
        "generate with prompt logprobs",
        one(
            GENERATE,
            lambda: _generated(
                {"input_ids": [7] * 8_000}, return_logprob=True, logprob_start_len=0, top_logprobs_num=20
            ),
        ),
    ),
)
