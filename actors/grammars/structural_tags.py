"""Grammars of structural tags: free text with regions that have to match schemas, in llguidance's dialect of Lark.

The web layer makes one from a `response_format` of type `structural_tag`, in the forms of vLLM, SGLang and xgrammar:
https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html. What must always hold: what cannot be enforced is
refused by name; text of any length ends at the first delimiter after it; the cost between two rules is that of one
schema, so that a caller can pause.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import attrs
import orjson

from ..messages.grammar import SCHEMA_FROM
from .tagged_values import JSON_FORM
from .text_values import UnsupportedSchema, between_slashes, ends_in_escape, pattern_of, quoted

MAX_TRIGGERS = 64
"""Of one format."""
MAX_DELIMITER_CHARS = 2048
"""Total length of the strings in a list that becomes one pattern."""
MAX_REPEATS = 1024
_ANY = "(?s:.*)"
_MORE = "(?s:.+)"
_UNBOUNDED = "text of any length must be the last part of a tag, or of the format"
_TOKEN = re.compile(r"<[^<>\s\[\]]+>")

Rules = Generator[str, None, str]
"""Yields rules, and returns an expression."""


@attrs.frozen
class _After:
    texts: tuple[str, ...] = ()
    """One of these, which the format's own expression has to include."""
    token: str = ""
    """Or this token, likewise."""
    is_end: bool = False
    """Or nothing."""

    @property
    def close(self) -> str:
        if self.token:
            return self.token
        return f"({' | '.join(map(quoted, self.texts))})" if self.texts else ""


_PART = _After()
"""Another part of the output, which unbounded text cannot precede."""


def structural_tag_rules(tag: Mapping[str, Any], param: str) -> Iterator[str]:
    """Yield the rules of a structural tag, whose type is known. Raises UnsupportedSchema."""
    if ("structures" in tag) == ("format" in tag):
        raise UnsupportedSchema(param, "must have either `format`, or `structures` and `triggers`")
    if "format" in tag:
        expression = yield from _Writer().format(tag["format"], f"{param}.format", _After(is_end=True))
    else:
        expression = yield from _Writer(is_older=True).triggered(tag, param, _After(is_end=True))
    yield f"start: {expression}\n"


@attrs.define
class _Writer:
    is_older: bool = False
    """Whether tags are `structures`, with a `schema` each."""
    _num_names: int = 0

    def _name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}_{self._num_names}"

    def _rule(self, expression: str) -> Rules:
        name = self._name("part")
        yield f"{name}: {expression}\n"
        return name

    def format(self, value: Any, where: str, after: _After) -> Rules:
        """Write one format, and what ends it if that is known."""
        match kind := _text(_object(value, where), "type", where):
            case "any_text":
                return (yield from self._any_text(value, where, after))
            case "sequence":
                return (yield from self._sequence(value, where, after))
            case "or":
                parts = []
                for index, element in enumerate(_list(value, "elements", where)):
                    parts.append((yield from self.format(element, f"{where}.elements[{index}]", after)))
                return (yield from self._rule(" | ".join(parts)))
            case "tag":
                return (yield from self._tag(value, where, after, ""))
            case "triggered_tags":
                return (yield from self.triggered(value, where, after))
        match kind:
            case "const_string":
                expression = quoted(_text(value, "value", where))
            case "token":
                expression = _token(value, where)
            case "json_schema":
                expression = yield from self._schema(value, where)
            case "regex":
                expression = yield from self._rule(_pattern(_text(value, "pattern", where), f"{where}.pattern"))
            case "optional" | "plus" | "star" | "repeat":
                content = yield from self.format(value.get("content"), f"{where}.content", _PART)
                expression = f"({content}){_times(value, kind, where)}"
            case "tags_with_separator":
                expression = yield from self._separated(value, where)
            case _:
                raise UnsupportedSchema(f"{where}.type", f"`{kind[:40]}` is not supported by this server")
        return (yield from self._rule(f"{expression} {after.close}"))

    def _sequence(self, value: Mapping[str, Any], where: str, after: _After) -> Rules:
        parts, elements = [], _list(value, "elements", where)
        for index, element in enumerate(elements):
            behind = after if index == len(elements) - 1 else _PART
            parts.append((yield from self.format(element, f"{where}.elements[{index}]", behind)))
        return (yield from self._rule(" ".join(parts)))

    def _schema(self, value: Mapping[str, Any], where: str) -> Rules:
        field = f"{where}.{'schema' if self.is_older else 'json_schema'}"
        schema = value.get("json_schema")
        if value.get("style", "json") != "json" or value.get("any_order"):
            raise UnsupportedSchema(where, "`style` and `any_order` are not supported by this server")
        if schema is True:
            schema = {}
        held = {**_object(schema, field), "x-guidance": JSON_FORM}
        name = self._name("part")
        yield f"{SCHEMA_FROM}{field}\n"
        yield f"{name}: %json {orjson.dumps(held).decode()}\n"
        return name

    def _any_text(self, value: Mapping[str, Any], where: str, after: _After) -> Rules:
        for name in ("max_tokens", "max_chars"):
            if value.get(name) is not None:
                raise UnsupportedSchema(f"{where}.{name}", "not supported by this server")
        return (yield from self._free_text(_texts(value, "excludes", where), (), where, after))

    def _free_text(self, excluded: Sequence[str], stops: Sequence[str], where: str, after: _After) -> Rules:
        """Write text without `excluded` and `stops`, and the first of what ends it."""
        if after is _PART:
            raise UnsupportedSchema(where, _UNBOUNDED)
        without = [*stops, *(text for text in excluded if text not in after.texts)]
        name = self._name("TEXT")
        if after.texts:
            yield f"{name}: {_first(after.texts, (*stops, *after.texts))}{_free_of(excluded, after.texts)}\n"
            return name
        yield f"{name}: /{_ANY}/{_free_of(without)}\n"
        return f"{name} {after.token}"

    def _tag(self, value: Any, where: str, after: _After, trigger: str) -> Rules:
        """Write the rest of a tag whose `trigger` has been written."""
        tag = _object(value, where)
        begin, end = tag.get("begin"), tag.get("end")
        if isinstance(begin, dict):
            opening = _token(begin, f"{where}.begin")
        else:
            opening = quoted(_text(tag, "begin", where)[len(trigger) :])
        ends: list[Any] = end if isinstance(end, list) else [end]
        inner = after
        if isinstance(end, dict):
            inner = _After(token=_token(end, f"{where}.end"))
        elif not all(isinstance(text, str) for text in ends) or not ends or ("" in ends and len(ends) > 1):
            raise UnsupportedSchema(f"{where}.end", "must be a string, a list of strings, or a token")
        elif ends != [""]:
            inner = _After(texts=tuple(_checked(ends, f"{where}.end")))
        form = {"type": "json_schema", "json_schema": tag.get("schema", {})} if self.is_older else tag.get("content")
        content = yield from self.format(form, where if self.is_older else f"{where}.content", inner)
        return (yield from self._rule(f"{opening} {content} {after.close if inner is not after else ''}"))

    def triggered(self, value: Mapping[str, Any], where: str, after: _After) -> Rules:
        """Write text in which a trigger begins one of its tags."""
        field = "structures" if self.is_older else "tags"
        tags, triggers = _list(value, field, where), _texts(value, "triggers", where)
        if not 0 < len(triggers) <= MAX_TRIGGERS:
            raise UnsupportedSchema(f"{where}.triggers", f"must have between 1 and {MAX_TRIGGERS} strings")
        excluded = _texts(value, "excludes", where)
        heads: dict[str, list[str]] = {}
        firsts = []
        for index, tag in enumerate(tags):
            at = f"{where}.{field}[{index}]"
            begin = _text(_object(tag, at), "begin", at)
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise UnsupportedSchema(f"{at}.begin", "must begin with one of the triggers, and with no other")
            heads.setdefault(found[0], []).append((yield from self._tag(tag, at, _PART, found[0])))
            firsts.append(f"{quoted(found[0])} {heads[found[0]][-1]}")
        dispatched = []
        for trigger, follow in heads.items():
            name = self._name("HEAD")
            yield f"{name}: {_first([trigger], (*triggers, *after.texts))}{_free_of(excluded)}\n"
            dispatched.append(f"{name} ({' | '.join(follow)})")
        some_tag = yield from self._rule(" | ".join(dispatched))
        stops, needed = _flag(value, "stop_after_first", where), _flag(value, "at_least_one", where)
        first = yield from self._rule(" | ".join(firsts))
        if stops and needed:
            return f"{first} {after.close}"
        rest = yield from self._free_text(excluded, triggers, where, after)
        if stops:
            return (yield from self._rule(f"{rest} | {some_tag} {after.close}"))
        return f"{first if needed else ''} ({some_tag})* {rest}"

    def _separated(self, value: Mapping[str, Any], where: str) -> Rules:
        parts = []
        for index, tag in enumerate(_list(value, "tags", where)):
            parts.append((yield from self._tag(tag, f"{where}.tags[{index}]", _PART, "")))
        one = yield from self._rule(" | ".join(parts))
        more = "" if _flag(value, "stop_after_first", where) else f"({quoted(_text(value, 'separator', where))} {one})*"
        return f"({one} {more}){'' if _flag(value, 'at_least_one', where) else '?'}"


def _first(ends: Sequence[str], stops: Sequence[str]) -> str:
    """Return a terminal for text up to the first of `stops`, which is one of `ends`."""
    return f"/{_ANY}({_either(ends)})/ & ~/{_ANY}({_either(stops)}){_MORE}/"


def _free_of(texts: Sequence[str], but: Sequence[str] = ()) -> str:
    left = [text for text in texts if text not in but]
    return f" & ~/{_ANY}({_either(left)}){_ANY}/" if left else ""


def _either(texts: Sequence[str]) -> str:
    return "|".join(map(pattern_of, texts))


def _token(value: Mapping[str, Any], where: str) -> str:
    token = value.get("token") if value.get("type") == "token" else None
    if type(token) is int and token >= 0:
        return f"<[{token}]>"
    if isinstance(token, str) and _TOKEN.fullmatch(token):
        return token
    raise UnsupportedSchema(where, "must be a token with its id, or with a name such as `<|end|>`")


def _pattern(pattern: str, where: str) -> str:
    if not pattern:
        raise UnsupportedSchema(where, "must not be empty")
    if ends_in_escape(pattern):
        raise UnsupportedSchema(where, "must not end with a backslash that escapes nothing")
    return f"/{between_slashes(pattern)}/"


def _times(value: Mapping[str, Any], kind: str, where: str) -> str:
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[kind]
    least, most = value.get("min"), value.get("max")
    if type(least) is not int or type(most) is not int or not 0 <= least <= MAX_REPEATS or most > MAX_REPEATS:
        raise UnsupportedSchema(where, f"`min` and `max` must be integers of at most {MAX_REPEATS}")
    if most != -1 and most < least:
        raise UnsupportedSchema(f"{where}.max", "must be -1, or at least `min`")
    return f"{{{least},{'' if most == -1 else most}}}"


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedSchema(where, "must be an object")
    return value


def _text(value: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := value.get(name), str):
        raise UnsupportedSchema(f"{where}.{name}", "must be a string")
    return text


def _list(value: Mapping[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(found := value.get(name), list) or not found:
        raise UnsupportedSchema(f"{where}.{name}", "must be a list that is not empty")
    return found


def _texts(value: Mapping[str, Any], name: str, where: str) -> list[str]:
    found = value.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise UnsupportedSchema(f"{where}.{name}", "must be a list of strings that are not empty")
    return _checked(found, f"{where}.{name}")


def _checked(texts: list[str], where: str) -> list[str]:
    if sum(map(len, texts)) > MAX_DELIMITER_CHARS:
        raise UnsupportedSchema(where, f"must have at most {MAX_DELIMITER_CHARS} characters")
    return texts


def _flag(value: Mapping[str, Any], name: str, where: str) -> bool:
    if not isinstance(found := value.get(name, False), bool):
        raise UnsupportedSchema(f"{where}.{name}", "must be a boolean")
    return found
