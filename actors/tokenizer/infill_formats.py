"""The tokens of prompts with a gap, for models that fill it in (FIM, "fill in the middle").

A tokenizer has such prompts if it has all added tokens of one of the formats below. `load_encoder` looks for them once,
and `infill.py` encodes the prompts.

Sources of the formats: the model cards and documentation of Qwen2.5-Coder, StarCoder, DeepSeek-Coder and CodeGemma; the
reference implementations of Code Llama (`llama/generation.py`) and Mistral (`mistral-common`); of Granite and GLM-4.5
the tokens that llama.cpp looks for (`src/llama-vocab.cpp`), in the order in which its `/infill` puts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from ..shared.tokenizers_library import Library

MARK: Final = "☺"
"""Stands before a text that is encoded as a continuation: some tokenizers put a space before every other text."""
_PROBE: Final = "x"


@attrs.frozen
class _Format:
    """The texts of added tokens. The prompt is prefix, suffix, middle; without a middle, suffix and prefix."""

    prefix: str
    suffix: str
    middle: str | None
    continues: bool = False
    """The suffix is encoded as the continuation of another text."""


_FORMATS: Final = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Format("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>", continues=True),  # Code Llama
    _Format("[PREFIX]", "[SUFFIX]", None, continues=True),  # Codestral
)


@attrs.frozen
class InfillTokens:
    """What a tokenizer puts around the two texts of such a prompt."""

    head: tuple[int, ...]
    """What it puts before every prompt, such as a beginning of sequence."""
    prefix: int
    suffix: int
    middle: int | None
    """None: the suffix comes first."""
    mark: tuple[int, ...]
    """The ids of `MARK`; none if a suffix is encoded by itself."""

    @property
    def num_tokens(self) -> int:
        return len(self.head) + (2 if self.middle is None else 3)

    def joined(self, before: list[int], after: list[int]) -> list[int]:
        if self.middle is None:
            return [*self.head, self.suffix, *after, self.prefix, *before]
        return [*self.head, self.prefix, *before, self.suffix, *after, self.middle]


def find_infill(library: Library, added: Mapping[str, int]) -> InfillTokens | None:
    """Return the tokens of the first format that is complete. `added`: ids of added tokens. Raises LibraryPanic."""
    for found in _FORMATS:
        ids = [None if text is None else added.get(text) for text in (found.prefix, found.suffix, found.middle)]
        prefix, suffix, middle = ids
        if prefix is None or suffix is None or (middle is None and found.middle is not None):
            continue
        mark = tuple(library.list_ids(MARK, add_special_tokens=False)) if found.continues else ()
        return InfillTokens(_head_of(library), prefix, suffix, middle, mark)
    return None


def _head_of(library: Library) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text."""
    plain, whole = library.list_ids(_PROBE, add_special_tokens=False), library.list_ids(_PROBE)
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)])
