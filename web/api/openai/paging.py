"""Pages of stored objects and items, as OpenAI's API has them: `after`, `limit` and `order`."""

from __future__ import annotations

from quart import request

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import Kind, NoSuchItem, Page, PageQuery

from ..query import Parameters, no_such_item
from .responses import check_included
from .store_door import StoreDoor, is_stored_id, no_object

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


def read_query(parameters: Parameters, *, default_order: str = "desc") -> PageQuery:
    """Return which page the current request asks for. Raises APIError."""
    after = parameters.text("after")
    if after is not None and not is_stored_id(after):
        raise no_such_item("after")
    limit = parameters.whole("limit", 1, MAX_LIMIT)
    order = parameters.choice("order", ("asc", "desc"), default_order)
    return PageQuery(after=after, limit=DEFAULT_LIMIT if limit is None else limit, is_ascending=order == "asc")


async def read_page(door: StoreDoor, tenant: str, kind: Kind, object_id: str, *, default_order: str = "desc") -> Page:
    """Return the page of an object's items that the current request asks for. Raises APIError."""
    parameters = Parameters(request.args)
    check_included(list(parameters.texts("include") or ()))
    query = read_query(parameters, default_order=default_order)
    page: Page | None = None
    if is_stored_id(object_id):
        try:
            page = await door.call(ObjectTables.page, tenant, kind, object_id, query)
        except NoSuchItem:
            raise no_such_item("after") from None
    if page is None:
        raise no_object(kind, object_id)
    return page
