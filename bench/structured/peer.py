"""xgrammar, another library that makes masks of JSON schemas, to measure beside. `make schemas` installs it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xgrammar


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what the library writes to standard error: a line for each keyword that it ignores."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Peer:
    """xgrammar for a byte-level vocabulary."""

    def __init__(self, tokenizer: dict[str, Any], end_id: int) -> None:
        entries = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
        info = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[end_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        self.version = version("xgrammar")

    def compile(self, source: str) -> Any:
        """Compile a schema to compact JSON. Raises RuntimeError if the library refuses it."""
        with quiet():
            return self._compiler.compile_json_schema(
                source, any_whitespace=False, separators=(",", ":"), strict_mode=False
            )

    def allows(self, compiled: Any, value: Any) -> bool:
        """Return whether a value is a possible output."""
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    def mask_times(self, compiled: Any, token_ids: list[int]) -> list[float]:
        """Return the seconds of each mask of an output, and of following its token, as far as it is allowed."""
        matcher, times = xgrammar.GrammarMatcher(compiled), []
        for token_id in token_ids:
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(self._mask)
            is_allowed = matcher.accept_token(token_id)
            if not is_allowed:
                break
            times.append(time.perf_counter() - began)
        return times
