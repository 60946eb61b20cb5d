"""What the files beside tokenizer.json say of a checkpoint's tokens: their names, their flags, and further ones.

Read as transformers (5.23, `TokenizersBackend`) reads tokenizer_config.json, and the older special_tokens_map.json and
added_tokens.json, which count where the former has no `added_tokens_decoder`. Used by `tokenizers_library.py`, which
adds the tokens to those of tokenizer.json, and by `tokenizer/template_source.py`, since templates know the named ones.

What must always hold: an entry that changes ids has the effect that it has there, or is refused by its name. Beside a
tokenizer.json, `add_bos_token`, `add_eos_token`, `add_prefix_space` and `legacy` have none. Classes for models, which
replace parts of tokenizer.json by their own, are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from .checkpoint import CheckpointError, read_json

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of chat templates that no token may have the name of."""
_ID = re.compile("[0-9]{1,10}")
_MAX_TOKENS = 100_000


@attrs.frozen
class Token:
    """A token that is recognized in a text as a whole."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool | None
    """None: unless it is special."""
    special: bool


@attrs.frozen
class SpecialTokens:
    named: Mapping[str, str | Token]
    """By name, such as `eos_token`."""
    extra: tuple[str | Token, ...]
    """Those without a name."""
    declared: Mapping[int, Token] | None
    """The entry `added_tokens_decoder`. None: there is none."""
    older: Mapping[int, Token]
    """Those of added_tokens.json."""

    @property
    def texts(self) -> dict[str, str]:
        return {name: _text_of(token) for name, token in self.named.items()}

    def to_add(self, known: Mapping[int, Token]) -> list[Token]:
        """Return the tokens that are to be added, in this order, to a tokenizer that has `known`."""
        declared = {**self.older, **known} if self.declared is None else self.declared
        by_text = {token.content: token for token in declared.values()}
        now = {token.content: token for token in known.values()}
        wanted: list[str | Token] = [token for _, token in sorted(declared.items())]
        texts = by_text.keys() | now.keys()
        named = [by_text.get(_text_of(token), token) for token in self.named.values()]
        wanted += (token for token in dict.fromkeys([*named, *self.extra]) if _text_of(token) not in texts)
        special = set(self.texts.values())
        found = []
        for one in wanted:
            token = _special(one) if isinstance(one, str) else one
            token = attrs.evolve(token, special=token.special or token.content in special)
            if token.normalized is None:
                token = attrs.evolve(token, normalized=not token.special)
            before = now.get(token.content)
            if before is not None and before.special:  # what the library has once taken for special it always skips
                token = attrs.evolve(token, special=True)
            if token != before:
                now[token.content] = token
                found.append(token)
        return found


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the files of the checkpoint in `folder`. Raises CheckpointError, naming file and entry."""
    config = _read(folder / CONFIG)
    _refuse(config)
    declared, special_map, older = None, {}, {}
    if "added_tokens_decoder" in config:
        declared = _read_declared(config["added_tokens_decoder"])
    else:
        special_map, older = _read(folder / MAP), _read(folder / ADDED)
    entries = {
        **{key: (CONFIG, value) for key, value in config.items()},
        **{key: (MAP, value) for key, value in special_map.items()},
    }
    named: dict[str, str | Token] = {}
    special: set[str] = set()
    """What makes a token of added_tokens.json a special one; some entries do not."""
    for key in dict.fromkeys((*_STANDARD, *entries)):
        file, value = entries.get(key, (CONFIG, None))
        if value is not None and (key in _STANDARD or (key.endswith("_token") and isinstance(value, str | dict))):
            named[key] = _read_token(value, file, key)
            if key in _STANDARD and (file == MAP or isinstance(value, str)):
                special.add(_text_of(named[key]))
    extra: list[str | Token] = []
    for file, key, value in _find_extra(config, special_map):
        if isinstance(value, dict):
            named |= {name: _read_token(token, file, f"{key}.{name[:80]}") for name, token in value.items()}
        elif isinstance(value, list):
            read = [_read_token(token, file, key) for token in value]
            extra += read
            if (file, key) != (MAP, _OLDER_EXTRA):
                special |= {_text_of(token) for token in read if file == MAP or isinstance(token, str)}
        elif value is not None:
            raise CheckpointError(f"{file}: {key} must be a list of tokens, or an object of tokens by name")
    if reserved := _RESERVED.intersection(named):
        raise CheckpointError(f"{CONFIG}: extra_special_tokens must not have the name {min(reserved)}")
    if len(named) + len(extra) > _MAX_TOKENS:
        raise CheckpointError(f"{CONFIG} has more than {_MAX_TOKENS} special tokens")
    return SpecialTokens(named, tuple(extra), declared, _read_older(older, special))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _refuse(config: dict[str, Any]) -> None:
    """Raise CheckpointError for an entry that changes ids in a way that is not supported."""
    for key in ("split_special_tokens", "fix_mistral_regex"):
        if config.get(key):
            raise CheckpointError(f"{CONFIG}: {key} is not supported")
    files = config.get("fast_tokenizer_files")
    if files and files != ["tokenizer.json"]:
        raise CheckpointError(f"{CONFIG}: fast_tokenizer_files is not supported: only tokenizer.json is read")


def _read_declared(value: Any) -> dict[int, Token]:
    place = f"{CONFIG}: added_tokens_decoder"
    if not isinstance(value, dict) or len(value) > _MAX_TOKENS:
        raise CheckpointError(f"{place} must be an object of at most {_MAX_TOKENS} tokens by id")
    if any(_ID.fullmatch(key) is None for key in value):
        raise CheckpointError(f"{place} has a key that is no token id")
    return {int(key): _read_flagged(token, f"{place}[{key}]") for key, token in value.items()}


def _read_older(value: dict[str, Any], special: set[str]) -> dict[int, Token]:
    if len(value) > _MAX_TOKENS or any(type(number) is not int for number in value.values()):
        raise CheckpointError(f"{ADDED} must have at most {_MAX_TOKENS} tokens, each with its id")
    return {
        number: _special(text)
        if text in special
        else Token(text, single_word=False, lstrip=False, rstrip=False, normalized=True, special=False)
        for text, number in ((_text(text, ADDED), number) for text, number in value.items())
    }


def _find_extra(config: dict[str, Any], special_map: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the entries with special tokens that have no standard name: each with its file, its key and its value."""
    key = _EXTRA if config.get(_EXTRA) or _OLDER_EXTRA not in config else _OLDER_EXTRA
    found = [(CONFIG, key, config.get(key))]
    if _EXTRA in special_map:
        found.append((MAP, _EXTRA, special_map[_EXTRA]))
    elif isinstance(config.get(key), dict) or (_OLDER_EXTRA not in config and _EXTRA not in config):
        found.append((MAP, _OLDER_EXTRA, special_map.get(_OLDER_EXTRA)))
    return found


def _read_token(value: Any, file: str, key: str) -> str | Token:
    """Read a token that is its text, or an object with flags."""
    place = f"{file}: {key}"
    return _text(value, place) if isinstance(value, str) else _read_flagged(value, place, is_special=file == MAP)


def _text(value: str, place: str) -> str:
    """Return what can be a token. Raises CheckpointError: JSON may have halves of characters, which no text has."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{place} has a lone surrogate") from None
    return value


def _read_flagged(value: Any, place: str, *, is_special: bool = False) -> Token:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise CheckpointError(f"{place} must be a string or an object with a `content`")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"{place} has a flag that is neither true nor false")
    special = is_special or flags.get("special", False)
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": None}
    return Token(_text(value["content"], place), **{**defaults, **flags, "special": special})


def _special(text: str) -> Token:
    return Token(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)


def _text_of(token: str | Token) -> str:
    return token if isinstance(token, str) else token.content
