"""Members of large objects are read and replaced without parsing the rest."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.fleet.upstreams import json_members
from quipu.actors.fleet.upstreams.json_members import CannotReplace, Member

USAGE = Member("usage")
JSON = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(["", "usage", '"usage":1', "a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["usage", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    before=st.dictionaries(st.sampled_from(["a", "b"]), JSON),
    value=JSON,
    after=st.dictionaries(st.sampled_from(["c", "d"]), JSON),
    new=JSON,
    indent=st.sampled_from([None, 1]),
)
def test_only_this_member_changes(before: Any, value: Any, after: Any, new: Any, indent: int | None) -> None:
    """Only the member is replaced or removed, whatever surrounds it and however it is written."""
    whole = {**before, "usage": value, **after}
    data = json.dumps(whole, indent=indent).encode()
    assert json.loads(USAGE.value(data) or b"") == value
    try:
        replaced, removed = USAGE.replace(data, json.dumps(new).encode()), USAGE.remove(data)
    except CannotReplace:
        assert data.count(b'"usage"') > json_members.MAX_TRIES
        return
    assert json.loads(replaced) == {**whole, "usage": new}
    assert json.loads(removed) == {**before, **after}


@pytest.mark.parametrize("data", [b'{"usage":1,"usage":2}', b'{"\\u0075sage":1}', b'{"a":1}'])
def test_what_cannot_be_found_is_not_replaced(data: bytes) -> None:
    """A member that occurs twice, is written with escapes, or is missing is an error."""
    with pytest.raises(CannotReplace):
        USAGE.remove(data)


def test_decoys_are_bounded() -> None:
    """Only a few places that have the member's name and value are tried; those with another value cost no try."""
    equal = b'{"a":[' + b'{"usage":{"b":1}},' * 10 + b'0],"usage":{"b":1},"z":[' + b'{"usage":{"b":1}},' * 10 + b"0]}"
    with pytest.raises(CannotReplace):
        USAGE.replace(equal, b"2")
    different = b'{"a":[' + b'{"usage":1},' * 1000 + b'0],"usage":{"b":1},"z":[' + b'{"usage":1},' * 20 + b"0]}"
    assert json.loads(USAGE.replace(different, b"2"))["usage"] == 2
    assert USAGE.value(b'{"a":1}') is None
    with pytest.raises(msgspec.DecodeError):
        USAGE.value(b'{"a":1')
