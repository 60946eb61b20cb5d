"""The OpenAPI document describes every route of the app, and nothing else; its schemas are schemas."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import jsonschema
import pytest

from quipu.actors.config.declarations import EVERY_API
from quipu.web.api.body_table import NAMES
from quipu.web.api.openapi.document import make_document, path_of
from quipu.web.auth.auth import OPEN_ROUTES
from tests.web.api.openapi.full_apps import ADMIN, TENANT, full_app, keyed
from tests.web.asgi_client import Client


@pytest.fixture(scope="module")
def document() -> Any:
    return make_document(full_app())


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def test_routes(document: Any) -> None:
    """The routes of the app are those of the document, in both directions."""
    live = {
        (method.lower(), path_of(rule.rule))
        for rule in full_app().url_map.iter_rules()
        for method in set(rule.methods or ()) - {"HEAD", "OPTIONS"}
    }
    assert {(method, path) for method, path, _ in operations(document)} == live
    assert live > {("post", path) for path in EVERY_API}


async def test_served() -> None:
    """Everybody gets the document, also from a server with keys; a client that has it is told so."""
    client = Client(full_app(keyed()))
    exchange, document = await client.get("/openapi.json")
    assert exchange.status == HTTPStatus.OK and document["openapi"].startswith("3.1")
    again = {"If-None-Match": exchange.headers["etag"]}
    async with client.open("GET", "/openapi.json", headers=again) as exchange:
        assert (await exchange.wait_started(), await exchange.read()) == (HTTPStatus.NOT_MODIFIED, b"")


def test_schemas_are_schemas(document: Any) -> None:
    """Every schema is valid in the dialect of OpenAPI 3.1, and every reference leads to a schema."""
    named = document["components"]["schemas"]
    for schema in named.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(find_references(document))
    assert references == {f"#/components/schemas/{name}" for name in named}


def find_references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from find_references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from find_references(inner)


def test_operations_are_told_apart(document: Any) -> None:
    """Every operation has an id of its own, a summary and a tag that is described."""
    described = [operation for _, _, operation in operations(document)]
    ids = [operation["operationId"] for operation in described]
    assert len(set(ids)) == len(ids)
    tags = {tag["name"] for tag in document["tags"]}
    assert all(operation["summary"] and set(operation["tags"]) <= tags for operation in described)


def test_bodies_have_names(document: Any) -> None:
    """The body of each generation endpoint is a schema with a name, and with what the endpoint requires."""
    required = {path: document["components"]["schemas"][NAMES[path]].get("required") for path in EVERY_API}
    assert required == {
        "/v1/completions": ["prompt"],
        "/v1/chat/completions": ["messages"],
        "/v1/responses": None,  # one that continues another may have no input
        "/v1/messages": ["max_tokens", "messages"],
    }


async def test_security(document: Any) -> None:
    """A route needs what the document says: nothing, a key, or an admin key."""
    client = Client(full_app(keyed()))
    for method, path, operation in operations(document):
        concrete = path.replace("{engine_id}", "7").replace("{", "").replace("}", "")
        allowed = {frozenset(one) for one in operation["security"]}
        for key, kind in ((None, ""), (TENANT, "apiKey"), (ADMIN, "adminKey")):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with client.open(method.upper(), concrete, b"", headers) as exchange:
                status = await exchange.wait_started()
            if kind == "adminKey" or not allowed or frozenset({kind}) in allowed:
                assert status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN), (method, path, kind)
            else:
                expected = HTTPStatus.UNAUTHORIZED if key is None else HTTPStatus.FORBIDDEN
                assert status == expected, (method, path, kind)
    assert {path for _, path, one in operations(document) if not one["security"]} == set(map(path_of, OPEN_ROUTES))
