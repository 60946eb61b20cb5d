"""An explanation in sentences, for a person at a terminal: what `quipu explain` prints without `--json`.

Made from the JSON of `web/api/cache/explanation_json.py`, which may come from another server: a field that is missing
or of another type is left out, and what is printed has no control characters. Messages and parts are counted from 1, as
the pages count them (`web/ui/static/explain.js`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeGuard

from .command_output import printable

MAX_LISTED = 50
"""Messages or pieces of advice of one prompt that are listed."""
MAX_SHOWN = 500
"""Characters of a text of the answer that are printed."""

REASONS = {
    "none": "Everything that could come from the cache did: only full blocks are kept, and a token is always computed.",
    "disabled": "Prefix caching is turned off on this server.",
    "shorter_than_a_block": "The prompt is too short: it does not fill one block of the cache.",
    "evicted": "What follows had been cached before, but its blocks were given to other prompts.",
    "other_domain": "The same tokens are cached for another tenant or salt; caches are never shared between them.",
    "nothing": "The prompt differs from every prompt that is cached from its beginning.",
    "diverged": "From there on the prompt differs from every prompt that is cached.",
    "needs_prompt_logprobs": "The request asks for scores of its prompt, so all of it was computed.",
    "needs_every_position": "The embedding is a mean over all of the prompt, so all of it was computed.",
    "cheaper_to_compute": "What follows is in a slower tier of the cache; to load it would have taken longer.",
    "load_failed": "What follows was in a slower tier of the cache, but could not be loaded, or not in time.",
}
NO_PLACE = ("none", "disabled", "needs_prompt_logprobs", "needs_every_position")
"""Reasons that have no place to name."""
SOURCES = {
    "reused": "reused",
    "host": "loaded from the host",
    "disk": "loaded from disk",
    "remote": "loaded from a remote cache",
    "copied": "copied from a part of a cached block",
    "moved": "moved from another engine",
    "computed": "computed",
}


def sentences(explanation: Any) -> Iterator[str]:
    if not isinstance(explanation, dict):
        yield "The answer is not an explanation."
        return
    usage, prompts = _dict(explanation.get("usage")), _list(explanation.get("prompts"))
    so_far = " is still open; so far it has" if explanation.get("state") == "open" else " had"
    yield f"Request {_text(explanation.get('request_id'))}{so_far} {_share(usage)}."
    if (parent := explanation.get("parent")) is not None:
        yield f"It was computed with the adapter {_text(explanation.get('model'))} of {_text(parent)}."
    yield from _covered_again(usage)
    for number, prompt in enumerate(islice(prompts, MAX_LISTED), 1):
        if len(prompts) > 1:
            yield ""
            yield f"Prompt {number} of {len(prompts)} had {_share(_dict(prompt))}."
        yield from _of_prompt(_dict(prompt))
    if len(prompts) > MAX_LISTED:
        yield f"{len(prompts) - MAX_LISTED:,} more prompts are left out; --json shows all."


def _share(numbers: dict[str, Any]) -> str:
    prompt, cached = numbers.get("prompt_tokens"), numbers.get("cached_tokens")
    if not _is_count(prompt):
        return "no admitted prompt" if prompt is None else "a prompt of unknown size"
    if not _is_count(cached):
        return f"{_tokens(prompt)} in its prompt; how many of them were cached is not known"
    share = f" ({cached / prompt:.0%})" if prompt else ""
    return f"{_tokens(prompt)} in its prompt, of which {cached:,}{share} came from the cache"


def _covered_again(usage: dict[str, Any]) -> Iterator[str]:
    if _is_count(restored := usage.get("restored_tokens")) and restored:
        yield f"{_tokens(restored)} {_were(restored)} found in the cache after an interruption."
    if _is_count(again := usage.get("recomputed_tokens")) and again:
        yield f"{_tokens(again)} {_were(again)} computed again after an interruption, or on another engine."


def _of_prompt(prompt: dict[str, Any]) -> Iterator[str]:
    messages = [_dict(each) for each in _list(prompt.get("messages"))]
    ended = prompt.get("ended")
    if isinstance(ended, dict):
        yield from _of_end(ended, messages)
    if _is_count(lost := prompt.get("lost_to_rounding")) and lost:
        yield f"{_tokens(lost)} more {_were(lost)} the same, but did not fill a block."
    spans = [_dict(each) for each in _list(prompt.get("blocks"))]
    for message in messages[:MAX_LISTED]:
        if told := _sources(message, spans):
            yield f"  {_name(message)}: {told}"
    if len(messages) > MAX_LISTED:
        yield f"  and {len(messages) - MAX_LISTED:,} more messages; --json shows all"
    for advice in _list(prompt.get("advice"))[:MAX_LISTED]:
        yield f"Advice: {_text(_dict(advice).get('text'))}"


def _of_end(ended: dict[str, Any], messages: list[dict[str, Any]]) -> Iterator[str]:
    reason = _text(ended.get("reason"))
    if reason not in NO_PLACE and _is_count(token := ended.get("token")):
        if token:
            yield f"The cached part ends at token {token:,}{_place(ended, messages)}."
        elif reason == "diverged":
            reason = "nothing"
    yield REASONS.get(reason, f"Reason: {reason}.")
    if isinstance(other := ended.get("diverged_from"), str):
        yield f"Request {_text(other)} continued differently there."
    if isinstance(evicted := ended.get("evicted"), dict):
        if isinstance(by := evicted.get("by"), str):
            yield f"Request {_text(by)} took its place."
        if isinstance(idle := evicted.get("idle_s"), int | float):
            yield f"It had not been used for {idle:.0f} s."


def _place(ended: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    if not _is_count(message := ended.get("message")):
        return ""
    role = next((f" ({_text(each.get('role'))})" for each in messages if each.get("index") == message), "")
    part = f", part {part + 1}" if _is_count(part := ended.get("part")) else ""
    return f", in message {message + 1}{role}{part}"


def _name(message: dict[str, Any]) -> str:
    role = _text(message.get("role"))
    return (
        f"message {index + 1}, {role}" if _is_count(index := message.get("index")) else f"{role}, no message of its own"
    )


def _sources(message: dict[str, Any], spans: list[dict[str, Any]]) -> str:
    """Return how many tokens of a message came from where."""
    found: dict[str, int] = {}
    start, end = message.get("start"), message.get("end")
    if not (_is_count(start) and _is_count(end)):
        return ""
    for span in spans:
        if _is_count(first := span.get("start")) and _is_count(last := span.get("end")):
            is_loaded = span.get("source") == "reused" and span.get("tier") not in (None, "device")
            source = _text(span.get("tier" if is_loaded else "source"))
            found[source] = found.get(source, 0) + max(0, min(end, last) - max(start, first))
    told = [f"{_tokens(number)} {SOURCES.get(source, source)}" for source, number in found.items() if number]
    return ", ".join(told)


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _text(value: Any) -> str:
    return printable((value if isinstance(value, str) else repr(value))[:MAX_SHOWN])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
