"""Large bodies are parsed piece by piece, with the same result as parsing them whole."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from quipu.web.api import json_body, json_structure
from quipu.web.api.json_body import parse_json
from quipu.web.api.json_structure import InvalidJson, TooComplex, find_structure

TEXTS = st.text(st.sampled_from('ab\\",:[]{}\n é漢😀\u2028'), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)
SIZES = st.tuples(st.integers(1, 8), st.integers(13, 40), st.integers(1, 50))
"""Values of a piece, bytes of a piece, bytes that are scanned at a time."""


def parsed(data: bytes, sizes: tuple[int, int, int]) -> Any:
    """Return the value parsed with pieces of these sizes, or the class of the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "INLINE_BYTES", 0)
        patch.setattr(json_body, "PIECE_VALUES", sizes[0])
        patch.setattr(json_body, "PIECE_BYTES", sizes[1])
        patch.setattr(json_structure, "_SCAN_BYTES", sizes[2])
        try:
            return trio.run(parse_json, data)
        except InvalidJson:
            return InvalidJson


def expected(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return InvalidJson


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), SIZES)
def test_pieces_parse_as_orjson_does(
    value: Any, ascii_only: bool, indent: int | None, sizes: tuple[int, int, int]
) -> None:
    """The result is orjson's for all piece sizes, wherever the pieces are cut."""
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert parsed(data, sizes) == expected(data)


EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([b"", *(bytes([c]) for c in b',[]{}"\\: x\xff')])),
    min_size=1,
    max_size=3,
)


@given(VALUES, EDITS, st.booleans(), SIZES)
def test_damaged_body_is_refused_as_by_orjson(
    value: Any, edits: list[tuple[float, bytes]], inserts: bool, sizes: tuple[int, int, int]
) -> None:
    """A body with characters lost, changed or inserted is accepted or refused as by orjson."""
    data = bytearray(json.dumps(value, ensure_ascii=False).encode())
    for place, new in edits:
        at = int(place * len(data))
        data[at : at + (0 if inserts else 1)] = new
    assert parsed(bytes(data), sizes) == expected(bytes(data))


@pytest.mark.parametrize("text", ["x" * 5000, "é😀" * 3000, "\\" * 4001, "\n\u2028" * 3000, '"' * 3001])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_string_is_parsed_in_parts(text: str, ascii_only: bool) -> None:
    """No part ends within a character or an escape."""
    data = json.dumps({"a": [1, 2], "prompt": text, "b": text}, ensure_ascii=ascii_only).encode()
    assert parsed(data, (4, 1000, 77)) == {"a": [1, 2], "prompt": text, "b": text}


def test_no_call_parses_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orjson sees a bounded part of a large body at a time, whatever its shape."""
    sizes: list[int] = []
    loads = orjson.loads

    def watch(data: Any) -> Any:
        sizes.append(len(data))
        return loads(data)

    monkeypatch.setattr("quipu.web.api.json_body.orjson.loads", watch)
    for body in (
        {"prompt": "x" * (3 << 20)},
        {"a": [[]] * 60_000, "b": [[1] * 40_000] * 3, "c": {"d": ["e" * 9] * 99_999}},
    ):
        data = json.dumps(body).encode()
        sizes.clear()
        assert trio.run(parse_json, data) == body
        assert len(sizes) > 1
        assert max(sizes) <= json_body.PIECE_BYTES + 2  # the brackets or quotes around it


@pytest.mark.parametrize(
    ("body", "what"),
    [(b"[" + b"[]," * (1 << 18) + b"1]", "objects and arrays"), (b"[" + b"1," * (1 << 22) + b"1]", "values")],
)
def test_too_complex(body: bytes, what: str) -> None:
    """A body with more objects or values than allowed is refused before any of them is made."""
    with pytest.raises(TooComplex, match=what):
        find_structure(body)


@pytest.mark.parametrize("piece", [b"k", rb"\"", rb"\u00e9"])
def test_huge_key(piece: bytes) -> None:
    """A key beside a large value is refused if it is too long, whatever it contains."""
    data = b'{"a":1,"' + piece * (json_body.PIECE_BYTES // len(piece) + 1) + b'":[1]}'
    with pytest.raises(TooComplex, match="key"):
        trio.run(parse_json, data)


def test_nested_too_deep() -> None:
    """Nesting is limited at the same depth as in orjson."""
    data = b'{"a":"' + b"x" * json_body.INLINE_BYTES + b'","b":' + b"[" * 2000 + b"]" * 2000 + b"}"
    with pytest.raises(InvalidJson, match="Recursion"):
        trio.run(parse_json, data)


def test_size_is_reported_before_values_are_made() -> None:
    """`expect` is called with the memory of a large body's values in time to refuse them."""
    expected_bytes: list[int] = []

    class Refused(Exception):
        pass

    def refuse(num_bytes: int) -> None:
        expected_bytes.append(num_bytes)
        raise Refused

    with pytest.raises(Refused):
        trio.run(parse_json, json.dumps([{"a": 1}] * 10_000).encode(), refuse)
    assert expected_bytes[0] >= 10_000 * json_structure.CONTAINER_BYTES
