"""Pages of the HTTP API, made of the OpenAPI document that a server with everything turned on serves.

One page for each tag of the document and one for the schemas that have a name. What must always hold: every operation
and every named schema of the document is on a page, with all of its fields.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from quipu.web.api.openapi.document import make_document
from tests.web.api.openapi.full_apps import full_app

from .schema_tables import body_of, fields_of, words_of

Operation = tuple[str, str, Mapping[str, Any]]
SCHEMAS = "schemas"
_KEYS = {"apiKey": "an API key", "adminKey": "an admin key"}


def http_pages() -> dict[str, str]:
    """Return the pages by their place in the reference."""
    document = make_document(full_app())
    by_tag: dict[str, list[Operation]] = defaultdict(list)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            by_tag[operation["tags"][0]].append((method.upper(), path, operation))
    told = {tag["name"]: tag["description"] for tag in document["tags"]}
    pages = {f"http/{slug(tag)}.md": _page(tag, told[tag], by_tag[tag], document) for tag in told}
    pages[f"http/{SCHEMAS}.md"] = _schemas(document)
    return {**pages, "http/index.md": _index(document, by_tag, told)}


def slug(title: str) -> str:
    """Return a heading as the anchor or the file name that is made of it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _index(document: Any, by_tag: Mapping[str, list[Operation]], told: Mapping[str, str]) -> str:
    lines = [
        "# HTTP API",
        "",
        document["info"]["description"],
        "",
        "These pages are made of the OpenAPI document that every server has at `/openapi.json`, of a server with",
        "everything turned on ([about the document](../../use/openapi.md)). Errors of a path under `/v1/messages` are",
        f"[AnthropicError]({SCHEMAS}.md#anthropicerror), of others [Error]({SCHEMAS}.md#error).",
        "",
    ]
    for tag in told:
        operations = by_tag[tag]
        lines += [f"## {tag}", "", told[tag], "", "| request | what it does |", "|---|---|"]
        lines += [
            f"| [`{method} {path}`]({slug(tag)}.md#{slug(f'{method} {path}')}) | {operation['summary']} |"
            for method, path, operation in operations
        ]
        lines.append("")
    return "\n".join([*lines, _toctree([*map(slug, told), SCHEMAS])])


def _toctree(pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, "```", ""])


def _page(tag: str, told: str, operations: list[Operation], document: Any) -> str:
    # not an anchor: the tag's name can be that of an operation
    lines = [f"# {tag}", "", told, ""]
    for method, path, operation in operations:
        lines += _operation(method, path, operation, document)
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any], document: Any) -> list[str]:
    lines = [f"## `{method} {path}`", "", f"{operation['summary']}. {operation.get('description', '')}".strip(), ""]
    kinds = [_KEYS[name] for scheme in operation["security"] for name in scheme if name in _KEYS]
    lines += [f"Needs {kinds[0]}." if kinds else "Needs no key.", ""]
    if parameters := operation.get("parameters"):
        lines += ["| parameter | values | what |", "|---|---|---|"]
        lines += [
            f"| `{one['name']}` (in the {one['in']}{', required' if one['in'] == 'query' and one['required'] else ''}) "
            f"| {words_of(one['schema'], SCHEMAS)} | {one.get('description', '')} |"
            for one in parameters
        ]
        lines.append("")
    if (body := operation.get("requestBody")) is not None:
        schema = body["content"]["application/json"]["schema"]
        lines += [f"**Body**{'' if body['required'] else ', which may be empty'}", ""]
        lines += body_of(schema, document["components"]["schemas"], SCHEMAS)
    lines += ["| answer | what |", "|---|---|"]
    for status, response in operation["responses"].items():
        lines.append(f"| {'other' if status == 'default' else f'`{status}`'} | {_answer(response)} |")
    return [*lines, ""]


def _answer(response: Mapping[str, Any]) -> str:
    parts = [response["description"]]
    for kind, content in response.get("content", {}).items():
        schema = content.get("x-event-data", content["schema"])
        about = f"events of {words_of(schema, SCHEMAS)}" if "x-event-data" in content else words_of(schema, SCHEMAS)
        parts.append(f"`{kind}`{f': {about}' if schema and schema != {'type': 'string'} else ''}")
    return "; ".join(parts)


def _schemas(document: Any) -> str:
    lines = ["# Schemas", "", "The objects of bodies and answers that have a name in the OpenAPI document.", ""]
    for name, schema in sorted(document["components"]["schemas"].items(), key=lambda item: item[0].lower()):
        lines += [f"## {name}", "", *fields_of(schema, ""), ""]
    return "\n".join(lines)
