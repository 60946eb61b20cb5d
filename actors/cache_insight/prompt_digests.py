"""Keyed digests of the parts of a chat, by which a later prompt is compared with it.

Used by the advisor. A message has several digests, each of which disregards something: the order of keys in JSON, the
reasoning, or what looks like a time or an id. The key is random and dies with the process, so nothing can be learned of
a text from its digests.

What must always hold: the work for one chat is bounded, and is done in slices of about a millisecond; no text is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import orjson

from ..messages.prompts import ChatPrompt

MAX_MESSAGES = 512
"""Messages of one chat that are digested, from the first."""
MAX_TOOLS = 256
EDGE_CHARACTERS = 1 << 13
"""Of a longer text, this much of each end and the length are digested."""
MAX_JSON_CHARACTERS = 1 << 14
"""A longer text is not read as JSON."""
MAX_JSON_NODES = 2_000
"""Values of one tool, or of the arguments of one message's calls; larger ones are not compared."""
MAX_JSON_TOTAL = 1 << 18
"""Characters of one chat that are read as JSON."""
NUM_LOOSE = 4
"""The first messages, in which times and ids are looked for."""
LOOSE_CHARACTERS = 1 << 13
LOOSE_WORDS = 512
"""Of a text that is longer than that."""
SLICE_CHARACTERS = 1 << 17
SLICE_MESSAGES = 32

_NAMES: Final = frozenset(
    (
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
        *("mon", "tue", "wed", "thu", "fri", "sat", "sun", "am", "pm"),
        *("january", "february", "march", "april", "may", "june", "july", "august", "september", "october"),
        *("november", "december", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    )
)
_MASK: Final = (1 << 64) - 1
_DIGIT = re.compile(r"\d")


@attrs.frozen
class PromptDigests:
    """The digests of one chat: columns by message, in order."""

    request_id: str
    tools: tuple[tuple[int, int], ...] = ()
    """By tool: its digest with its keys as they are, and sorted. Empty: no tools, or too many to compare."""
    whole: array[int] = attrs.field(factory=lambda: array("Q"))
    """Of everything in it."""
    ordered: array[int] = attrs.field(factory=lambda: array("Q"))
    """JSON written anew, with its keys as they are..."""
    sorted_keys: array[int] = attrs.field(factory=lambda: array("Q"))
    """...and sorted."""
    unreasoned: array[int] = attrs.field(factory=lambda: array("Q"))
    """Without its reasoning."""
    loose: array[int] = attrs.field(factory=lambda: array("Q"))
    """Without its reasoning, with sorted keys and, in the first messages, without times and ids."""
    num_chars: array[int] = attrs.field(factory=lambda: array("I"))
    has_reasoning: bytearray = attrs.field(factory=bytearray)
    roles: list[str] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def first_user(self) -> int | None:
        return next((index for index, role in enumerate(self.roles) if role == "user"), None)

    @property
    def has_system(self) -> bool:
        return bool(self.roles) and self.roles[0] in ("system", "developer")


class Digester:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def digest(self, *values: bytes | int) -> int:
        """Return a digest of 64 bits of a sequence of values."""
        state = hashlib.blake2b(digest_size=8, key=self._key)
        for value in values:
            data = value if isinstance(value, bytes) else value.to_bytes(8, "little")
            state.update(len(data).to_bytes(4, "little"))
            state.update(data)
        return int.from_bytes(state.digest(), "little")

    def _of_bytes(self, data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=self._key).digest(), "little")

    def _of_text(self, text: str) -> int:
        if len(text) > 2 * EDGE_CHARACTERS:
            text = f"{len(text)}:{text[:EDGE_CHARACTERS]}{text[-EDGE_CHARACTERS:]}"
        return self._of_bytes(text.encode("utf-8", "surrogatepass"))

    def slices(self, chat: ChatPrompt, request_id: str) -> Iterator[PromptDigests | None]:
        """Yield None after each slice of the work, and the digests at the end."""
        made = PromptDigests(request_id, self._of_tools(chat))
        yield None
        rest_json, num_chars = MAX_JSON_TOTAL, 0
        for index, message in enumerate(chat.messages[:MAX_MESSAGES]):
            rest_json -= self._add(made, message, index, rest_json)
            num_chars += min(made.num_chars[-1], 4 * EDGE_CHARACTERS)
            if num_chars > SLICE_CHARACTERS or index % SLICE_MESSAGES == SLICE_MESSAGES - 1:
                num_chars = 0
                yield None
        yield made

    def _of_tools(self, chat: ChatPrompt) -> tuple[tuple[int, int], ...]:
        if len(chat.tools) > MAX_TOOLS or not _is_small(chat.tools):
            return ()
        return tuple((self._of_bytes(_dump(tool)), self._of_bytes(_dump(tool, is_sorted=True))) for tool in chat.tools)

    def _add(self, made: PromptDigests, message: Mapping[str, Any], index: int, rest_json: int) -> int:
        """Add one message; return how many characters of it were read as JSON."""
        content, role = str(message["content"] or ""), str(message["role"])
        reasoning = str(message.get("reasoning_content") or "")
        text = sorted_text = whole = self._of_text(content)
        may_be_json = content[:1] in ("{", "[") and len(content) <= min(MAX_JSON_CHARACTERS, rest_json)
        in_json = self._of_json(content) if may_be_json else None
        if in_json is not None:
            text, sorted_text = in_json
        loose = self._of_text(without_times(content)) if index < NUM_LOOSE and in_json is None else sorted_text
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        call_digest = sorted_calls = 0
        if calls and _is_small(calls):
            call_digest, sorted_calls = self._of_bytes(_dump(calls)), self._of_bytes(_dump(calls, is_sorted=True))
        thought = self._of_text(reasoning) if reasoning else 0
        made.whole.append(_mixed(role, whole, call_digest, thought))
        made.ordered.append(_mixed(role, text, call_digest, thought))
        made.sorted_keys.append(_mixed(role, sorted_text, sorted_calls, thought))
        made.unreasoned.append(_mixed(role, whole, call_digest))
        made.loose.append(_mixed(role, loose, sorted_calls))
        made.num_chars.append(len(content))
        made.has_reasoning.append(bool(reasoning))
        made.roles.append(role)
        return len(content) if may_be_json else 0

    def _of_json(self, content: str) -> tuple[int, int] | None:
        """Return the digests of a text as JSON, with its keys as they are and sorted; None if it is not JSON."""
        try:
            value = orjson.loads(content)
        except (orjson.JSONDecodeError, ValueError):
            return None
        return self._of_bytes(_dump(value)), self._of_bytes(_dump(value, is_sorted=True))


def _mixed(*digests: str | int) -> int:
    """Return one number for several digests, which are keyed."""
    return hash(digests) & _MASK


def without_times(text: str) -> str:
    """Replace words that look like times or ids by `#`; of a long text, keep both ends."""
    words: list[str] = []
    for word in text[:LOOSE_CHARACTERS].split():
        if _DIGIT.search(word) or word.strip(",.;:()[]\"'").lower() in _NAMES:
            if words[-1:] != ["#"]:
                words.append("#")
        else:
            words.append(word)
    if len(text) > LOOSE_CHARACTERS:
        words[LOOSE_WORDS:] = [text[-EDGE_CHARACTERS // 2 :]]
    return " ".join(words)


def _dump(value: Any, *, is_sorted: bool = False) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if is_sorted else None)
    except TypeError:  # integers of more than 64 bits, lone surrogates
        return json.dumps(value, sort_keys=is_sorted).encode()


def _is_small(value: Any) -> bool:
    """Return whether a value has few parts and short texts, in bounded time."""
    left, num_nodes, num_chars = [value], 0, 0
    while left:
        one = left.pop()
        num_nodes += 1
        if isinstance(one, str):
            num_chars += len(one)
        elif isinstance(one, Mapping):
            num_nodes += len(one)
            if num_nodes <= MAX_JSON_NODES:
                num_chars += sum(map(len, one))
                left += one.values()
        elif isinstance(one, (list, tuple)):
            num_nodes += len(one)
            if num_nodes <= MAX_JSON_NODES:
                left += one
        if num_nodes > MAX_JSON_NODES or num_chars > MAX_JSON_TOTAL:
            return False
    return True
