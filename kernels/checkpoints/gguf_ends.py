"""Which tokens of a GGUF file's vocabulary end a generation: what the file says, and what llama.cpp knows by name.

Used by `gguf_config.py`, and by `gguf_tokenizer.py` for what is not text. Converters have left out keys, and have
called such tokens normal, so llama.cpp (`src/llama-vocab.cpp`, `special_eog_ids`) goes by their texts; a model that
is not stopped at one runs on.

What must always hold: a number that is no token of the vocabulary is no end.
"""

from __future__ import annotations

import attrs

from .gguf_file import GgufFile

_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "< EOT >", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001
    )
)
_BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of models that fill in code, by key: what follows them is another file. The first that is there is taken."""
_NOT_WITH = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
)
"""Tokens that end a part of a turn only, by others of whose vocabularies that is known."""
_KNOWN = _ENDS.union(*_BETWEEN_FILES.values())
_DEFAULT_END = {"llama": 2}
"""By the kind of vocabulary, if no key says it. For `gpt2` llama.cpp has Falcon's, which is a comma elsewhere."""


@attrs.frozen
class Ends:
    """The tokens that end a generation."""

    ids: tuple[int, ...]
    """Those that the keys name come first."""
    known_by_text: frozenset[int]
    """Those that are control tokens, whatever type the file gives them."""


def find_ends(file: GgufFile) -> Ends:
    """Return the ends of the file's vocabulary."""
    tokens = file.keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return Ends((), frozenset())
    ids = {token: number for number, token in enumerate(tokens) if token in _KNOWN}
    dropped = {ids[token] for token, others in _NOT_WITH if token in ids and all(other in ids for other in others)}
    by_text = [number for token, number in ids.items() if token in _ENDS and number not in dropped]
    default = _DEFAULT_END.get(str(file.keys.get("tokenizer.ggml.model")))
    by_key = [_id_at(file, "eos", tokens, default), _id_at(file, "eot", tokens), _id_at(file, "eom", tokens)]
    for kind, texts in _BETWEEN_FILES.items():
        if f"tokenizer.ggml.{kind}_token_id" in file.keys:
            by_key.append(_id_at(file, kind, tokens))
        else:
            by_text += [ids[text] for text in texts if text in ids][:1]
    found = [number for number in by_key if number is not None and number not in dropped]
    return Ends(tuple(dict.fromkeys(found + by_text)), frozenset(by_text))


def _id_at(file: GgufFile, kind: str, tokens: list[str], default: int | None = None) -> int | None:
    number = file.keys.get(f"tokenizer.ggml.{kind}_token_id", default)
    return number if type(number) is int and 0 <= number < len(tokens) else None
