"""What is declared of the routes of the pages."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from ..api.admin.report_schemas import TIME, texts
from ..api.admin.usage_buckets import WIDTHS
from ..api.body_field import BodyField
from ..api.operation import ANY_OBJECT, FLAG, PAGES, TEXT, TEXT_VALUE, Operation, by_name, maybe, record
from .table_report import GROUPS

HTML: Final = "text/html; charset=utf-8"
FORMATS: Final = ("json", "csv")
CSV: Final = "text/csv; charset=utf-8"
ROOT = Operation(
    summary="Find the pages and APIs",
    tag=PAGES,
    answer=record({"server": TEXT_VALUE, "urls": by_name(TEXT_VALUE)}),
    others={HTTPStatus.TEMPORARY_REDIRECT: "A browser is sent to the pages."},
)
REDIRECT = Operation(summary="Go to the pages", tag=PAGES, status=HTTPStatus.PERMANENT_REDIRECT, content_type=HTML)
SHOW_DOCS = Operation(summary="Show this API to a browser", tag=PAGES, content_type=HTML)
SHOW_PAGE = Operation(summary="Show the pages", tag=PAGES, content_type=HTML)
FILE = Operation(
    summary="Load a file of the pages",
    tag=PAGES,
    path={"name": "The name of a file."},
    content_type=TEXT,
    others={HTTPStatus.NOT_FOUND: "There is no such file."},
)
SESSION = Operation(
    summary="Show whose key this is, and what it may see",
    tag=PAGES,
    answer=record(
        {
            "version": TEXT_VALUE,
            "needs_key": FLAG,
            "tenant": TEXT_VALUE,
            "key_id": maybe(TEXT_VALUE),
            "key_name": maybe(TEXT_VALUE),
            "is_admin": FLAG,
            "shows_live": FLAG,
            "shows_cache": FLAG,
            "shows_usage": FLAG,
            "has_prices": FLAG,
        }
    ),
)
KEY_NAMES = Operation(
    summary="Show the names of keys",
    tag=PAGES,
    query=(texts("id", "The ids of keys."),),
    answer=record({"names": by_name(maybe(TEXT_VALUE))}),
)
USAGE_TABLE = Operation(
    summary="Show usage by time, model, kind, key and tenant, with its cost",
    tag=PAGES,
    help="With `format=csv`, the answer is CSV.",
    other_type=CSV,
    query=(
        BodyField(name="since", schema=TIME, help="Unix seconds; a day before `until` if absent."),
        BodyField(name="until", schema=TIME, help="Unix seconds; now if absent."),
        BodyField(name="bucket", choices=tuple(WIDTHS), help="The length of a bucket; one for all if absent."),
        texts("tenant", "Only of these tenants."),
        texts("by", "What to tell apart.", *GROUPS),
        BodyField(name="format", choices=FORMATS, default="json", help="Of the answer."),
    ),
    answer=ANY_OBJECT,
)
