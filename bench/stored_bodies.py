"""Random bodies for endpoints that change what is stored, or make files and batches of it.

Used like `bodies.py`. Most of them need something that exists: what `Made` says is requested first, and `{id}` in a
path or a body is the id in its answer, of which `{request}` is the end. Other bodies may refer to a response that
exists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.bodies import bodies
from bench.body_parts import (
    CHAT,
    COMPACT,
    COMPLETIONS,
    CONVERSATIONS,
    INPUT_TOKENS,
    JUNK,
    LOOKUP,
    MESSAGES,
    MODEL,
    OBJECT,
    RESPONSES,
    TEXT,
    mostly,
)
from bench.history_bodies import ITEM

FILES, BATCHES, MESSAGE_BATCHES = "/v1/files", "/v1/batches", "/v1/messages/batches"
JSON: Mapping[str, str] = {"Content-Type": "application/json"}
FORM: Mapping[str, str] = {"Content-Type": "multipart/form-data; boundary=knots"}
BATCH_FILE = b"".join(
    b'{"custom_id":"%d","method":"POST","url":"%b","body":{"model":"demo","prompt":"Hi.","max_tokens":%d}}\n'
    % (number, COMPLETIONS.encode(), number)
    for number in range(3)
)
"""The first of its lines is refused."""


@attrs.frozen
class Made:
    """A request that makes what others change."""

    path: str
    body: bytes
    headers: Mapping[str, str] = JSON


@attrs.frozen
class StoredBody:
    """What is drawn for one endpoint."""

    bodies: Strategy[bytes]
    made: Made | None = None
    headers: Mapping[str, str] = JSON


def _json(
    required: Mapping[str, Strategy[Any]], optional: Mapping[str, Strategy[Any]] | None = None
) -> Strategy[bytes]:
    """Draw an object that mostly has the required fields, and sometimes others; sometimes none at all."""
    fields = {name: mostly(value, JUNK) for name, value in required.items()}
    return mostly(
        st.fixed_dictionaries(fields, optional={**(optional or {}), "no_field": JUNK}).map(_encoded),
        JUNK.map(_encoded) | st.binary(max_size=20),
    )


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    """Draw a form with a file: fields in any order, some twice or unknown, and broken ones."""
    parts = [_part('name="file"; filename="in.jsonl"', draw(_CONTENTS))]
    if draw(mostly(st.just(True), st.just(False))):
        parts.append(_part('name="purpose"', draw(mostly(st.just(b"batch"), st.binary(max_size=9)))))
    for name, value in draw(st.lists(_FIELDS, max_size=3)):
        parts.append(_part(f'name="{name}"', value))
    data = b"".join(draw(st.permutations(parts))) + b"--knots--\r\n"
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 9)) :]
    return data


def _part(disposition: str, value: bytes) -> bytes:
    return b"--knots\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (disposition.encode(), value)


_METADATA = mostly(st.dictionaries(TEXT.map(lambda text: text[:64]), TEXT, max_size=3), OBJECT)
_CONTENTS = st.sampled_from([BATCH_FILE, b"", b"\n", b"{}", b"--knots", b"\r\n--knots", b"x" * 300_000]) | st.binary()
_FIELDS = st.tuples(
    mostly(
        st.sampled_from(["expires_after[anchor]", "expires_after[seconds]", "user", "purpose"]),
        st.sampled_from(["file", "", "x" * 5000, 'a"; b="c', "a\r\nb: c"]),
    ),
    mostly(st.sampled_from([b"created_at", b"3600", b"7200", b"-1", b"1" * 5000]), st.binary(max_size=9)),
)
_WINDOW = mostly(st.sampled_from(["24h", "30m", "7d"]), st.sampled_from(["31d", "0h", "9999d", "24 h", ""]))
_ENDPOINT = mostly(st.just(COMPLETIONS), st.sampled_from([CHAT, MESSAGES, "/v1/models", "/metrics", ""]))
_EXPIRES = st.fixed_dictionaries(
    {"anchor": mostly(st.just("created_at"), JUNK), "seconds": mostly(st.sampled_from([3600, 2_592_000]), JUNK)}
)
_PARAMS = mostly(bodies(MESSAGES).filter(lambda data: data.isascii() and _is_json(data)).map(json.loads), JUNK)
_REQUEST = st.fixed_dictionaries(
    {
        "custom_id": mostly(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.sampled_from(["a", "", "x" * 65]) | JUNK),
        "params": _PARAMS,
    },
    optional={"no_field": JUNK},
)
_CONVERSATION = Made(CONVERSATIONS, b"{}")
_COMPLETION = Made(
    CHAT,
    _encoded(
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1, "store": True},
    ),
)
_FILE = Made(
    FILES, _part('name="purpose"', b"batch") + _part('name="file"; filename="a"', BATCH_FILE) + b"--knots--", FORM
)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


_RESPONSE = Made(RESPONSES, _encoded({"model": MODEL, "input": "Hi.", "max_output_tokens": 1}))
MADE_FIRST: Mapping[str, Made] = dict.fromkeys((RESPONSES, INPUT_TOKENS, COMPACT, LOOKUP), _RESPONSE)
"""By endpoint of `bodies.py`: what its bodies may refer to."""


def filled(template: bytes, made_id: str) -> bytes:
    """Return a body that refers to what was made."""
    return template.replace(b"{id}", made_id.encode()).replace(b"{request}", made_id.partition("_")[2].encode())


STORED_BODIES: Mapping[str, StoredBody] = {
    f"{CONVERSATIONS}/{{id}}": StoredBody(_json({"metadata": _METADATA}), _CONVERSATION),
    f"{CONVERSATIONS}/{{id}}/items": StoredBody(_json({"items": st.lists(ITEM, max_size=5)}), _CONVERSATION),
    f"{CHAT}/{{id}}": StoredBody(_json({"metadata": _METADATA}), _COMPLETION),
    FILES: StoredBody(forms(), headers=FORM),
    BATCHES: StoredBody(
        _json(
            {
                "input_file_id": mostly(st.just("{id}"), TEXT),
                "endpoint": _ENDPOINT,
                "completion_window": _WINDOW,
            },
            {"metadata": _METADATA, "output_expires_after": mostly(_EXPIRES, JUNK)},
        ),
        _FILE,
    ),
    MESSAGE_BATCHES: StoredBody(_json({"requests": st.lists(_REQUEST, min_size=1, max_size=3)})),
}
"""By path, `{id}` included."""
