"""The `tokenizer.json` and `tokenizer_config.json` that a GGUF file's keys stand for. No torch.

`gguf_folder.py` writes them. A file names how text is split before merges apply (`gguf_splitting.py`).

What must always hold: the same text has the same ids as with the tokenizer that the file was made from.
"""

from __future__ import annotations

from typing import Any

from .gguf_ends import find_ends
from .gguf_file import GgufFile, shown
from .gguf_merges import find_merges
from .gguf_splitting import SPLITTING

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 behind which white space stays; behind its others it is dropped."""


def make_tokenizer(file: GgufFile) -> dict[str, Any]:
    """Return the `tokenizer.json` of a file. Raises ValueError naming a key that is missing or not supported."""
    kind = file.keys.get("tokenizer.ggml.model")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        again = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        raise ValueError(f"key 'tokenizer.ggml.tokens' has token {shown(again)} twice")
    types = _types(file, tokens)
    for name in ("add_eos_token", "add_sep_token"):
        if file.keys.get(f"tokenizer.ggml.{name}"):
            raise ValueError(f"key 'tokenizer.ggml.{name}' is true, which is not supported")
    if kind == "gpt2":
        parts = _byte_level(file, vocab)
    elif kind in ("llama", "gemma4"):
        parts = _sentence_pieces(file, vocab, types, has_merges=kind == "gemma4")
    else:
        raise ValueError(f"key 'tokenizer.ggml.model' is {shown(kind)}; supported are 'gpt2', 'llama' and 'gemma4'")
    # which tokens do is in no key: llama.cpp, too, knows it by the model
    strips = kind == "llama" and file.keys.get("general.architecture") == "phi3"
    control = find_ends(file).known_by_text
    added = [
        {
            "id": number,
            "content": token,
            "special": types[number] != _USER_DEFINED or number in control,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and types[number] == _CONTROL and token not in _NOT_STRIPPED,
        }
        for number, token in enumerate(tokens)
        if token and (types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED) or number in control)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def make_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of a file, which holds its chat template."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        number = file.keys.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[f"{name}_token"] = _token(tokens, f"tokenizer.ggml.{key}_token_id", number)
    template = file.keys.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError("key 'tokenizer.chat_template' must be a string")
        config["chat_template"] = template
    return config


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> dict[str, Any]:
    """Return a tokenizer that merges bytes, as GPT-2 does."""
    pre = file.keys.get("tokenizer.ggml.pre", "default")
    splitting = SPLITTING.get(pre) if isinstance(pre, str) else None
    if splitting is None:
        raise ValueError(f"key 'tokenizer.ggml.pre' is {shown(pre)}; supported are {', '.join(SPLITTING)}")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not splitting.pattern}
    steps: list[dict[str, Any]] = [level]
    if splitting.each_digit:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if splitting.pattern:
        isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
        steps = [{**isolated, "pattern": {"Regex": one}} for one in (*splitting.before, splitting.pattern)] + steps
    merges = _merges(file, vocab)
    whole = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if splitting.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _with_bos(file, list(vocab), splitting.adds_bos) or whole,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocab, merges, unk=None, byte_fallback=False, ignore_merges=splitting.ignore_merges),
    }


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[list[str]]:
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        pair = merge.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise ValueError(f"key 'tokenizer.ggml.merges' has {shown(merge)}, which is not two tokens that make one")
        merges.append(pair)
    return merges


def _merges_by_score(file: GgufFile, tokens: list[str], types: list[int]) -> list[list[str]]:
    scores = file.keys.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], int | float):
        raise ValueError("key 'tokenizer.ggml.scores' must have a number for every token")
    # tokens that a vocabulary's author has defined have the best score: runs of spaces, for example
    mergeable = [number for number, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)]
    return find_merges(tokens, mergeable, scores)


def _sentence_pieces(file: GgufFile, vocab: dict[str, int], types: list[int], *, has_merges: bool) -> dict[str, Any]:
    """Return a tokenizer of SentencePiece's BPE, which merges the pair with the best score, or that is listed first."""
    tokens = list(vocab)
    adds_space = file.keys.get("tokenizer.ggml.add_space_prefix", True)
    unknown = file.keys.get("tokenizer.ggml.unknown_token_id", 0)
    normalizer: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, normalizer]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": _with_bos(file, tokens, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocab,
            _merges(file, vocab) if has_merges else _merges_by_score(file, tokens, types),
            unk=_token(tokens, "tokenizer.ggml.unknown_token_id", unknown),
            byte_fallback=any(kind == _BYTE for kind in types),
            ignore_merges=False,
        ),
    }


def _model(
    vocab: dict[str, int], merges: list[list[str]], *, unk: str | None, byte_fallback: bool, ignore_merges: bool
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _with_bos(file: GgufFile, tokens: list[str], default: bool) -> dict[str, Any] | None:
    """Return what puts the first token before a text; None if nothing does."""
    number = file.keys.get("tokenizer.ggml.bos_token_id")
    if number is None or not file.keys.get("tokenizer.ggml.add_bos_token", default):
        return None
    bos = _token(tokens, "tokenizer.ggml.bos_token_id", number)
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            *(first, {"Sequence": {"id": "A", "type_id": 0}}),
            *({"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}),
        ],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }


def _token(tokens: list[str], key: str, number: Any) -> str:
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"key '{key}' is {shown(number)}, there are {len(tokens)} tokens")
    return tokens[number]


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.keys.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError(f"key {key!r} must be a list of strings")
    return value


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    types = file.keys.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens) or not isinstance(types[0], int):
        raise ValueError("key 'tokenizer.ggml.token_type' must have an integer for every token")
    return types
