"""Rows of requests whose outputs have to match a large or a costly grammar, or whose grammar is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.http_load import request_of
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Row, chat, completion, response, said

NUM_BODIES = 8
"""Each is of another grammar, so that none is known."""
LARGE = 120_000
"""Characters: a little less than `--max-grammar-bytes`."""
NUM_TOKENS = 200
"""Of rows whose outputs go on, so that every token's mask counts and not only the first."""


def _each(path: str, body: Callable[[int], dict[str, Any]]) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [RawRequest(request_of(port, body(number), path)) for number in range(NUM_BODIES)]


def _schema(number: int, num_properties: int = 2_500) -> dict[str, Any]:
    properties = {f"p{number}_{i}": {"type": "string", "maxLength": 9} for i in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _required(number: int) -> dict[str, Any]:
    schema = _schema(number, 2_000)
    return {**schema, "required": list(schema["properties"])}


def _objects(number: int) -> dict[str, Any]:
    """Return a schema of objects with nearly as many optional properties as an object may have."""
    return {"type": "object", "properties": {f"o{i}": _schema(number, 490) for i in range(5)}}


def _enum(number: int) -> dict[str, Any]:
    return {"enum": [f"value {number} {i}" for i in range(LARGE // 18)]}


def _references(number: int, depth: int = 400) -> dict[str, Any]:
    """Return a schema whose definitions refer to each other, nearly as deep as is allowed."""
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(depth)}
    return {"$defs": {**chain, f"d{depth}": {"const": number}}, "$ref": "#/$defs/d0"}


def _patterns(number: int) -> dict[str, Any]:
    pattern = f"^(a?){{{100 + number}}}(a|b|[a-z0-9]+)*$"
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": pattern} for i in range(300)}}


def _gbnf(number: int) -> str:
    return f"root ::= {' | '.join(f'{chr(34)}{number} {i}{chr(34)} root' for i in range(1_800))}"


def _lark(number: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1} | /[a-z]{{{number + 1},9}}/" for i in range(400))
    return f"start: r0\n{rules}\nr400: {' | '.join(f'{chr(34)}{i}{chr(34)}' for i in range(6_000))}\n"


def _recursive_lark(number: int) -> str:
    return f"start: {' | '.join(f'{chr(34)}{number} {i}{chr(34)} start' for i in range(1_800))}"


def _hidden_lark(number: int) -> str:
    """Return a grammar in which a wide place is always next, and never reached by the token that is drawn."""
    return f'start: ("{number}" | "a" | "b" wide)+\nwide: {" | ".join(f"{chr(34)}c{i}{chr(34)}" for i in range(6_000))}'


def _endless_lark(number: int) -> str:
    """Return a grammar whose next tokens cannot be found once an output has so many letters."""
    return f'start: /[a-z ]{{{number}}}/ /a+/ "ab"'


def _alternatives(number: int) -> dict[str, Any]:
    """Return a schema of lists of 300 kinds of lists, so that each element may go on in nearly 2,000 ways."""
    kinds = [{"type": "array", "items": {"const": number + i}} for i in range(300)]
    return {"type": "array", "items": {"anyOf": kinds}}


def _tag(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    structures = [{"begin": f"<f={number}.{i}>", "schema": schema, "end": "</f>"} for i in range(400)]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}


def _tools(number: int) -> list[dict[str, Any]]:
    schema = _schema(number, 20)
    return [{"name": f"t{number}_{i}", "description": "Does it.", "input_schema": schema} for i in range(100)]


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "name": "answer", "schema": schema}


def _chat(**fields: Any) -> dict[str, Any]:
    return chat([said("Hi.")], **fields)


def _long(**fields: Any) -> dict[str, Any]:
    return _chat(max_tokens=NUM_TOKENS, **fields)


def _formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


GRAMMAR_ROWS: Sequence[Row] = (
    Row("schemas of 2,500 properties", _each(CHAT, lambda n: _formatted(_schema(n))), 4),
    Row("schemas of 2,000 required properties", _each(CHAT, lambda n: _formatted(_required(n))), 4),
    Row("schemas of objects of 490 properties", _each(CHAT, lambda n: _formatted(_objects(n))), 4),
    Row("schemas of 6,600 strings", _each(RESPONSES, lambda n: response("Hi.", text={"format": _named(_enum(n))})), 4),
    Row("schemas that refer 400 deep", _each(COMPLETIONS, lambda n: completion("Hi.", guided_json=_references(n))), 4),
    Row("schemas of 300 patterns", _each(CHAT, lambda n: _chat(structured_outputs={"json": _patterns(n)})), 4),
    Row("choices of 4,096 strings", _each(CHAT, lambda n: _chat(guided_choice=[f"{n} {i}" for i in range(4096)])), 4),
    Row("costly patterns", _each(CHAT, lambda n: _chat(guided_regex=f"((a?){{{50 + n}}}b*){{200}}x")), 4),
    Row("long patterns", _each(CHAT, lambda n: _chat(guided_regex=f"[a-z]{n}" * (LARGE // 8))), 4),
    Row("GBNF of 1,800 alternatives", _each(CHAT, lambda n: _chat(guided_grammar=_gbnf(n))), 4),
    Row("Lark of 6,000 alternatives", _each(CHAT, lambda n: _chat(guided_grammar=_lark(n))), 4),
    Row("GBNF of 1,800 alternatives, 200 tokens", _each(CHAT, lambda n: _long(guided_grammar=_gbnf(n))), 4),
    Row("Lark of 1,800 alternatives, 200 tokens", _each(CHAT, lambda n: _long(guided_grammar=_recursive_lark(n))), 4),
    Row("Lark of a hidden 6,000, 200 tokens", _each(CHAT, lambda n: _long(guided_grammar=_hidden_lark(n))), 4),
    Row("Lark without end", _each(CHAT, lambda n: _chat(guided_grammar=_endless_lark(n))), 4),
    Row("Lark without end later", _each(CHAT, lambda n: _long(guided_grammar=_endless_lark(100 + n))), 4),
    Row("schemas of 300 kinds, 200 tokens", _each(CHAT, lambda n: _long(guided_json=_alternatives(n))), 4),
    Row("structural tags of 400 schemas", _each(CHAT, lambda n: _chat(response_format=_tag(n))), 4),
    Row(
        "forced calls of 100 tools",
        _each(MESSAGES, lambda n: _chat(tools=_tools(n), tool_choice={"type": "any"})),
        4,
    ),
)
