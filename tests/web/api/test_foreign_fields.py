"""Request fields of other servers: each one is declared, and every endpoint treats it as declared."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.config.declarations import EVERY_API
from quipu.actors.messages.sampling import SAMPLING_FIELDS
from quipu.web.api.body_table import SHAPES
from quipu.web.api.foreign_table import FOREIGN, ForeignField, ignored_foreign, refuse_foreign
from quipu.web.app import make_app
from quipu.web.request.errors import APIError
from quipu.web.request.request_context import IGNORED_FIELDS_HEADER
from tests.web.api.peer_schemas import CHAT, COMPLETIONS, PEER_FIELDS, RESPONSES
from tests.web.asgi_client import Client
from tests.web.asked import THINKING
from tests.web.fakes import INFO, FakeDesk

MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
VALUES: tuple[Any, ...] = ("x", 0.25, 7, True, False, ["x"], {"x": 1})
NAME = IGNORED_FIELDS_HEADER.lower()


def effective(field: ForeignField) -> Any:
    """Return a value that is not neutral."""
    return next(value for value in VALUES if value not in field.neutral)


async def ask(path: str, **fields: Any) -> tuple[int, dict[str, Any], str | None]:
    """Return status, answer and the fields that were ignored."""
    desk = FakeDesk(info=attrs.evolve(INFO, output=THINKING))
    exchange, answer = await Client(make_app(desk)).post(path, {"model": "tiny", **BODIES[path], **fields})
    return exchange.status, answer, exchange.headers.get(NAME)


@pytest.mark.parametrize(("server", "path"), sorted(PEER_FIELDS))
def test_every_field_is_decided(server: str, path: str) -> None:
    """No field of another server's schema is unknown: it is read, refused, or known to be harmless."""
    assert PEER_FIELDS[server, path] - SHAPES[path].by_name.keys() == set()


HARMLESS_ELSEWHERE = {
    *("cache_control", "client_metadata", "context_management", "include", "include_reasoning", "max_tool_calls"),
    *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "return_cached_tokens_details"),
    *("safety_identifier", "service_tier", "store", "stream_options", "user", "verbosity"),
    *("input", "messages", "prompt"),
    *("dimensions", "encoding_format", "instruction", "query", "return_documents", "top_n", "truncation_side"),
    *("text_1", "text_2", "queries", "items", "data_1", "data_2", "max_tokens_per_doc", "max_tokens_per_query"),
    *("embed_dtype", "endianness", "normalize", "padding", "rank_fields", "use_activation"),
}
"""Fields that change no answer of an endpoint that does not read them: plain texts have no calls, fields of the cache
and labels never change an answer, and a request without the endpoint's own input is refused anyway."""


@pytest.mark.parametrize("path", sorted(EVERY_API))
def test_fields_of_the_other_endpoints(path: str) -> None:
    """If a field of one endpoint would change the answer of another, the other one knows the field and refuses it."""
    every = set().union(*(shape.by_name for shape in SHAPES.values()))
    assert every - SHAPES[path].by_name.keys() <= HARMLESS_ELSEWHERE


def test_decided_once() -> None:
    """No field is declared twice for an endpoint, nor as a sampling field or a field of other servers, too."""
    sampling = {field.name for field in SAMPLING_FIELDS}
    for path, declared in SHAPES.items():
        own = [field for field in declared.fields if path in field.apis or path in field.refusals]
        names = [field.name for field in own]
        assert len(set(names)) == len(names)
        assert not set(names) & (FOREIGN.keys() | sampling)


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_fields_that_change_the_answer(path: str) -> None:
    """Each such field is a 400 that names it and, if there is one, the field to use instead."""
    for field in FOREIGN.values():
        if not field.is_refused or field.only_with:
            continue
        status, answer, _ = await ask(path, **{field.name: effective(field)})
        error = answer["error"]
        assert status == 400, field
        assert f"`{field.name}` would change the answer" in error["message"]
        if path != MESSAGES:
            assert (error["param"], error["code"]) == (field.name, "unsupported_parameter")
        has_hint = field.instead is not None and path in (CHAT, COMPLETIONS)
        assert (f"Use `{field.instead}` instead." in error["message"]) == has_hint


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_neutral_values(path: str) -> None:
    """Neutral values are accepted together and not named, nor are fields that have no effect beside them."""
    fields = {field.name: field.neutral[0] for field in FOREIGN.values() if field.neutral}
    dependent = {field.name: effective(field) for field in FOREIGN.values() if field.only_with}
    for given in (fields, fields | dependent, dict.fromkeys(FOREIGN)):
        assert (await ask(path, **given))[::2] == (200, None)


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_harmless_fields_are_named(path: str) -> None:
    """A harmless field is accepted and named as ignored."""
    for field in FOREIGN.values():
        if field.is_refused:
            continue
        assert (await ask(path, **{field.name: VALUES[1]}))[::2] == (200, field.name)


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"repeat_last_n": 64}, False),
        ({"repeat_last_n": 64, "presence_penalty": 0.0, "repetition_penalty": 1}, False),
        ({"repeat_last_n": 64, "presence_penalty": 0.5}, True),
        ({"repeat_last_n": -1, "presence_penalty": 0.5}, False),
        ({"dry_base": 1.75, "dry_multiplier": 0}, False),
        ({"dry_base": 1.75, "dry_multiplier": None}, False),
        ({"options": {}}, False),
        ({"options": {"num_ctx": 4096, "num_gpu": 1}}, False),
        ({"options": {"num_ctx": 4096, "temperature": 0}}, True),
        ({"options": [1]}, True),
        ({"samplers": {}}, True),
        ({"length_penalty": True}, True),
        ({"typical_p": 1.0, "xtc_probability": 0.0, "dry_multiplier": 0}, False),
    ],
)
def test_fields_that_depend_on_others(given: dict[str, Any], *, is_refused: bool) -> None:
    """A window without penalties, or options that only say how a model is loaded, change nothing."""
    try:
        refuse_foreign(given)
    except APIError as error:
        assert is_refused and error.param in given
    else:
        assert not is_refused


def test_first_field_of_the_table_is_named() -> None:
    """Of several refused fields the error names the one that the others depend on, in whatever order they are sent."""
    for names in (("dry_base", "dry_multiplier"), ("dry_multiplier", "dry_base")):
        with pytest.raises(APIError) as refusal:
            refuse_foreign(dict.fromkeys(names, 2))
        assert refusal.value.param == "dry_multiplier"
    assert ignored_foreign({"options": {"num_ctx": 4096}, "keep_alive": -1, "n_keep": 0}) == ("options", "keep_alive")


@pytest.mark.parametrize("name", sorted({field.instead for field in FOREIGN.values() if field.instead}))
def test_what_to_use_instead_is_served(name: str) -> None:
    """Chat and completions both read a field that an error recommends."""
    for path in (CHAT, COMPLETIONS):
        assert name in SHAPES[path].by_name and path not in SHAPES[path].by_name[name].refusals and name not in FOREIGN
