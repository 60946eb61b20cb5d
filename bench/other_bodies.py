"""The fields of other servers' endpoints, and of those that generate no text: embeddings, adapters, tokens, and so on.

Hypothesis strategies, of which `bodies.py` draws. A new field of these endpoints needs a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.body_fields import ADMISSION, AFFINITY, CHOICES, FOREIGN, MAX_TOKENS, SAMPLING, TEMPLATE
from bench.body_parts import (
    CONVERSATIONS,
    DETOKENIZE,
    EMBEDDINGS,
    GENERATE,
    INFILL,
    JUNK,
    LLAMA,
    LOAD,
    MODEL,
    RERANK,
    SCHEMA,
    SCORE,
    TEXT,
    TOKEN,
    TOKENIZE,
    TOKENS,
    UNLOAD,
    mostly,
)
from bench.history_bodies import CHAT_TURNS, ITEM

_ADAPTER = mostly(st.sampled_from(["one", "two", "three"]), st.sampled_from([MODEL, "", "a/../b", "x" * 200]))
_ADAPTER_PATH = mostly(
    st.sampled_from(["first", "second", "first/."]),
    st.sampled_from(["", ".", "..", "/etc", "nowhere", "empty", "first/adapter_config.json", "\0", "x/" * 3000]),
)
_GENERATE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_NOT_OF_GENERATE = frozenset({"allowed_token_ids", "bad_words", "response_format"})
SAMPLING_PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": MAX_TOKENS},
    optional={
        **{
            _GENERATE_NAMES.get(name, name): values
            for name, values in {**SAMPLING, **CHOICES}.items()
            if name not in _NOT_OF_GENERATE
        },
        "stop_regex": mostly(st.just(""), JUNK),
        "json_schema": SCHEMA,
        "max_tokens": JUNK,
    },
)
_POOLED = {**ADMISSION, **FOREIGN, **AFFINITY, "return_cached_tokens_details": st.booleans()}
_OF_LLAMA: Mapping[str, Strategy[Any]] = {
    **{name: values for name, values in SAMPLING.items() if name not in _NOT_OF_GENERATE},
    **ADMISSION,
    **FOREIGN,
    "stop": CHOICES["stop"],
    "n_cmpl": CHOICES["n"],
    "n": CHOICES["n"],
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "logprobs": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
    "repeat_penalty": mostly(st.sampled_from([1, 1.5]), JUNK),
    "n_probs": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
    "json_schema": SCHEMA,
    "return_tokens": st.booleans(),
    "cache_prompt": mostly(st.booleans(), JUNK),
    "stream": st.booleans(),
}
REQUIRED: Mapping[str, Mapping[str, Strategy[Any]]] = {
    LOAD: {"lora_name": _ADAPTER, "lora_path": _ADAPTER_PATH},
    UNLOAD: {"lora_name": _ADAPTER},
    CONVERSATIONS: {"items": mostly(st.lists(ITEM, max_size=5), JUNK)},
    TOKENIZE: {"prompt": mostly(TEXT, st.none()), "messages": mostly(st.none(), CHAT_TURNS)},
    DETOKENIZE: {"tokens": TOKENS},
    LLAMA: {
        "prompt": TEXT
        | TOKENS
        | st.lists(TEXT | TOKEN, min_size=1, max_size=4)
        | st.lists(TEXT | TOKENS | st.lists(TEXT | TOKEN, max_size=3), min_size=1, max_size=3)
    },
    INFILL: {"input_prefix": TEXT, "input_suffix": TEXT},
    GENERATE: {"text": TEXT | st.lists(TEXT, min_size=1, max_size=3)},
    EMBEDDINGS: {
        "input": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
    },
    SCORE: {"text_1": TEXT | st.lists(TEXT, min_size=1, max_size=2), "text_2": TEXT | st.lists(TEXT, max_size=3)},
    RERANK: {"query": TEXT, "documents": st.lists(TEXT | st.fixed_dictionaries({"text": TEXT}), max_size=3)},
}
OPTIONAL: Mapping[str, Mapping[str, Strategy[Any]]] = {
    LOAD: {"load_inplace": mostly(st.booleans(), JUNK)},
    UNLOAD: {"lora_int_id": JUNK},
    CONVERSATIONS: {"metadata": mostly(st.dictionaries(TEXT, TEXT, max_size=3), JUNK)},
    TOKENIZE: {
        **TEMPLATE,
        "add_special_tokens": mostly(st.booleans(), JUNK),
        "return_token_strs": mostly(st.booleans(), JUNK),
        "continue_final_message": st.booleans(),
    },
    DETOKENIZE: {"skip_special_tokens": JUNK},
    LLAMA: _OF_LLAMA,
    INFILL: {**_OF_LLAMA, "prompt": TEXT},
    GENERATE: {
        **ADMISSION,
        "sampling_params": mostly(SAMPLING_PARAMS, JUNK),
        "return_logprob": st.booleans(),
        "logprob_start_len": st.integers(-2, 9),
        "top_logprobs_num": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
        "return_text_in_logprobs": st.booleans(),
        "return_prompt_token_ids": st.booleans(),
        "stream": st.booleans(),
        "rid": JUNK,
    },
    EMBEDDINGS: {
        **_POOLED,
        "dimensions": mostly(st.integers(1, 16), st.integers(-1, 20)),
        "encoding_format": mostly(st.sampled_from(["float", "base64"]), JUNK),
    },
    SCORE: {**_POOLED, "instruction": TEXT},
    RERANK: {
        **_POOLED,
        "instruction": TEXT,
        "top_n": mostly(st.integers(0, 4), JUNK),
        "return_documents": mostly(st.booleans(), JUNK),
    },
}
