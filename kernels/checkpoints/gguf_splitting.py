"""How text is split before merges apply, by the names that GGUF files have for it (`tokenizer.ggml.pre`).

Used by `gguf_tokenizer.py`. The names and what they stand for are llama.cpp's (`src/llama-vocab.cpp`); its `default`,
and names with patterns of their own, are not read.

What must always hold: a name that is not known here is refused, since any other splitting would tokenize nearly the
same.
"""

from __future__ import annotations

import attrs

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen
class Splitting:
    """How text is split before merges apply."""

    pattern: str | None
    """None: as GPT-2."""
    before: tuple[str, ...] = ()
    """Patterns that text is split by before, one after the other."""
    is_nfc: bool = False
    each_digit: bool = False
    ignore_merges: bool = False
    """Whether a piece that is a token is not looked at any further."""
    adds_bos: bool = False
    """By default."""


_GPT2 = Splitting(None)
_EACH_DIGIT = Splitting(None, each_digit=True)
_LLAMA3 = Splitting(_CL100K, ignore_merges=True, adds_bos=True)
_GPT4 = Splitting(_CL100K)
_GPT4O = Splitting(_O200K)
_TEKKEN_SPLITTING = Splitting(_TEKKEN, ignore_merges=True, adds_bos=True)
_QWEN2 = Splitting(_QWEN, is_nfc=True)
_LIKE_QWEN2 = Splitting(_QWEN)
_DEEPSEEK3_SPLITTING = Splitting(_DEEPSEEK3, before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"))
_DEEPSEEK_CODER = Splitting(
    r"\p{N}", before=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
)

_NAMES = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4": _GPT2,
    "mpt olmo jais trillion granite-docling": _GPT2,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _EACH_DIGIT,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3,
    "dbrx smaug-bpe glm4 chatglm-bpe": _GPT4,
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
    "tekken": _TEKKEN_SPLITTING,
    "qwen2 deepseek-r1-qwen f2llmv2": _QWEN2,
    "deepseek-v3 hunyuan-dense": _DEEPSEEK3_SPLITTING,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kormo megrez stablelm2 hunyuan solar-open grok-2": _LIKE_QWEN2,
}
"""By the pattern. Those of Qwen's own tokenizers normalize text, which llama.cpp leaves to its caller."""
SPLITTING = {name: splitting for names, splitting in _NAMES.items() for name in names.split()}
"""Values of `tokenizer.ggml.pre`."""
