"""Items as they are stored: those of an input with ids and in the form in which clients' types expect them back.

What must always hold: a stored item is read into the same message as the one that the client sent, so that the next
turn finds this one in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import orjson

from quipu.actors.response_store.stored import Page, StoredItem

from ...http.sse import json_for_line
from ...http.turns import turn
from ...request.errors import bad_value
from ..pace import ITEMS_A_TURN, Pace
from ..whole_response import joined
from .responses_logprobs import Logprobs
from .store_door import is_stored_id

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_BYTES_A_TURN = 1 << 16
_NO_LOGPROBS = b'"logprobs":[]'
"""In the data of a message of an output, and nowhere else: JSON escapes the quotes within texts."""
MAX_LOGPROBS_BYTES = 8 << 20
"""Of one response; of a response with more none are stored."""


async def input_items(value: Any, request_id: str, pace: Pace, param: str = "input") -> Sequence[StoredItem]:
    """Return the items of an `input` that has been read. Raises APIError for one that cannot be encoded."""
    if value is None:
        return ()
    if type(value) is str:
        value = [{"role": "user", "content": value}]
    stored: list[StoredItem] = []
    known: set[str] = set()
    for index, item in enumerate(value):
        await pace.tick()
        whole = _whole(item)
        item_id = whole.get("id")
        if type(item_id) is not str or item_id in known or not is_stored_id(item_id):
            item_id = f"{_PREFIXES.get(whole['type'], 'item')}_{request_id}_i{index}"
        known.add(item_id)
        try:
            data = json_for_line({"id": item_id, **{name: inner for name, inner in whole.items() if name != "id"}})
        except orjson.JSONEncodeError:
            raise bad_value(f"{param}[{index}]", "nested too deeply to be stored") from None
        if len(data) > _BYTES_A_TURN:
            await pace.tick(ITEMS_A_TURN)
        stored.append(StoredItem(item_id, data))
    return stored


def _whole(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with the fields that clients' types require."""
    kind = item.get("type") or "message"
    whole = {**item, "type": kind}
    if kind == "message":
        is_answer = item.get("role") == "assistant"
        content = item.get("content")
        if type(content) is str:
            content = [{"type": "output_text" if is_answer else "input_text", "text": content}]
        whole["content"] = [_whole_part(part) for part in content] if type(content) is list else content
    if kind == "reasoning" and whole.get("summary") is None:
        whole["summary"] = []
    if whole.get("status") is None and (kind == "message" or kind.endswith("_call")):
        whole["status"] = "completed"
    return whole


def _whole_part(part: Any) -> Any:
    is_output = type(part) is dict and part.get("type") == "output_text"
    return {"annotations": [], "logprobs": [], **part} if is_output else part


async def output_items(items: Iterable[dict[str, Any]], logprobs: Logprobs | None = None) -> Sequence[StoredItem]:
    """Return the items of a response, encoded in slices, with the logprobs of their texts if there is room for all."""
    stored: list[StoredItem] = []
    num_bytes = 0
    async with turn():
        for item in items:
            stored.append(StoredItem(item["id"], json_for_line(item)))
            num_bytes += len(stored[-1].data)
            if num_bytes > _BYTES_A_TURN:
                num_bytes = 0
                turn().release()
                await turn().acquire()
    return stored if logprobs is None else await _with_logprobs(stored, logprobs)


async def _with_logprobs(items: Sequence[StoredItem], logprobs: Logprobs) -> Sequence[StoredItem]:
    stored: list[StoredItem] = []
    num_texts = num_bytes = 0
    for item in items:
        told = b""
        if _NO_LOGPROBS in item.data:
            told = await joined(logprobs.pieces(logprobs.scores.block(num_texts)), MAX_LOGPROBS_BYTES - num_bytes)
            num_texts += 1
            num_bytes += len(told)
        if num_bytes > MAX_LOGPROBS_BYTES:
            return items
        stored.append(attrs.evolve(item, logprobs=told))
    return stored


def whole_item(item: StoredItem) -> bytes:
    """Return an item of an output as its client gets it."""
    told = item.logprobs
    return item.data.replace(_NO_LOGPROBS, _NO_LOGPROBS[:-2] + told, 1) if told else item.data


def page_body(page: Page) -> bytes:
    """Return a list of items as clients get it."""
    first, last = (page.ids[0], page.ids[-1]) if page.ids else (None, None)
    rest = orjson.dumps({"first_id": first, "last_id": last, "has_more": page.has_more})[1:]
    return b'{"object":"list","data":[' + b",".join(page.data) + b"]," + rest
