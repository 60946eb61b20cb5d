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

_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with case, as DeepSeek's first pattern lists them: those of an older Unicode, without a few scripts."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


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
_DEEPSEEK_CODER = Splitting(r"\p{N}", before=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK))
_DEEPSEEK_LLM = Splitting(
    r"\p{N}",
    before=(
        "[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
    ),
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
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kormo megrez stablelm2 hunyuan solar-open grok-2": _LIKE_QWEN2,
}
"""By the pattern. Those of Qwen's own tokenizers normalize text, which llama.cpp leaves to its caller."""
SPLITTING = {name: splitting for names, splitting in _NAMES.items() for name in names.split()}
"""Values of `tokenizer.ggml.pre`."""
