"""Compacted histories: what the model is asked for, and the item that seals its summary.

    POST /v1/responses/compact      the newest user messages of a history, and the item
    POST /v1/responses              the item alone, if the input ends with a `compaction_trigger` (`triggered.py`)

The model writes the summary in one request that is admitted, counted and cancelled like any other. The history is read
as for a response, with the same tools, so that it is found in the prefix cache; one message at its end asks for the
summary. The item comes back in a later input (`responses_input.py`).

What must always hold: no history is lost in silence: a summary without text is an error. Messages are kept whole or not
at all, the newest ones first, and never fill more than half of the context.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import ServingInfo

from ...auth.sealed_texts import TenantSeal
from ...request.errors import bad_value, invalid
from ..answer import Reply
from ..body_table import COMPACTED
from ..content import Content, TextBlock
from ..generation import NO_SCORES, GenerationRequest
from ..pace import Pace
from ..stream import Transcript
from ..usage import openai_usage
from .prompt_cache import PREWARM
from .responses_body import response_usage, with_items
from .store_door import is_stored_id

MAX_SUMMARY_TOKENS = 4096
"""With the reasoning before it, which takes at most half of them."""
LEAST_SUMMARY_TOKENS = 64
"""A history that leaves less room in the context is too long."""
MAX_KEPT_BYTES = 1 << 18
"""Of user messages, in UTF-8; at most half as many as the context has tokens, each of which has at least one byte. Of
their images, as many again; they count as their tokens in the context."""
INSTRUCTION = (
    "Summarize our conversation: the summary will replace it. Keep what is needed to continue: what I want, decisions "
    "and constraints, what was done and found (names, paths, numbers, results of tools), and what is still open. "
    "Answer with the summary alone, and call no tools."
)
_SWITCH = "enable_thinking"
_REASONING = ("chat_template_kwargs", _SWITCH, "reasoning")
"""Fields that say whether the model is to reason. Without one of them it is not, if it can be told."""
_IMAGE = "input_image"
Item = dict[str, Any]


def response_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the response that has the history of a body for this endpoint."""
    return quiet({name: body[name] for name in COMPACTED if name in body})


def quiet(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a response that does not reason unless it says so."""
    return {**body} if any(body.get(name) is not None for name in _REASONING) else {**body, _SWITCH: False}


def summarizing(wanted: GenerationRequest, info: ServingInfo, body: Mapping[str, Any]) -> GenerationRequest:
    """Return the request for a summary of the history of a response. `body`: the client's. Raises APIError."""
    (prompt,) = wanted.prompts
    assert isinstance(prompt, ChatPrompt)
    if wanted.is_prewarm:
        raise bad_value(PREWARM, "not allowed for a summary, which has to be generated")
    said = prompt.messages[1:] if wanted.system_param else prompt.messages
    if not any(message["content"] or len(message) > len(("role", "content")) for message in said):
        raise bad_value("input", "has nothing to summarize")
    num_tokens = min(wanted.max_tokens or MAX_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS)
    has_reasoning, budget = info.output.reasoning_tags is not None, wanted.thinking_budget
    return attrs.evolve(
        wanted,
        prompts=(attrs.evolve(prompt, messages=(*prompt.messages, {"role": "user", "content": INSTRUCTION})),),
        max_tokens=num_tokens,
        least_room=LEAST_SUMMARY_TOKENS,
        sampling=attrs.evolve(
            wanted.sampling, max_tokens=num_tokens, temperature=0.0, logprobs=None, prompt_logprobs=None
        ),
        scores=NO_SCORES,
        grammar=None,
        output=None if wanted.output is None else attrs.evolve(wanted.output, tool_types={}),
        thinking_budget=min(num_tokens // 2, num_tokens if budget is None else budget) if has_reasoning else None,
        unused_fields=tuple(name for name in wanted.unused_fields if name != _SWITCH or body.get(name) is not None),
    )


async def kept_messages(
    items: Sequence[Item], value: Any, request_id: str, info: ServingInfo, pace: Pace
) -> Sequence[Item]:
    """Return the newest user messages of a history that has been read: `items`, and then the `value` of an input."""
    if type(value) is str:
        value = [{"role": "user", "content": value}]
    left, left_of_images = min(MAX_KEPT_BYTES, info.max_model_len // 2), MAX_KEPT_BYTES
    tokens_of_image = 0 if info.images is None else info.images.num_tokens
    kept: list[Item] = []
    history = (*items, *(value or ()))
    for number in range(len(history) - 1, -1, -1):
        await pace.tick()
        item = history[number]
        if item.get("role") != "user" or item.get("type") not in (None, "message"):
            continue
        parts = [{"text": item["content"]}] if type(item["content"]) is str else item["content"]
        urls = [part["image_url"] for part in parts if part.get("type") == _IMAGE]
        left -= tokens_of_image * len(urls)
        left -= _num_bytes((part["text"] for part in parts if part.get("type") != _IMAGE), left)
        left_of_images -= sum(map(len, urls))
        if left < 0 or left_of_images < 0:
            break
        item_id = item.get("id")
        if type(item_id) is not str or not is_stored_id(item_id):
            item_id = f"msg_{request_id}_{number}"
        content = [_kept_part(part) for part in parts]
        kept.append({"id": item_id, "type": "message", "status": "completed", "role": "user", "content": content})
    return kept[::-1]


def _kept_part(part: Item) -> Item:
    if part.get("type") == _IMAGE:
        return {"type": _IMAGE, "image_url": part["image_url"], "detail": "auto"}
    return {"type": "input_text", "text": part["text"]}


def _num_bytes(texts: Iterable[str], limit: int) -> int:
    """Return the bytes of texts, or a number above the limit if they have more."""
    num_bytes = 0
    for text in texts:
        num_bytes += len(text)
        if num_bytes <= limit:
            num_bytes += len(text.encode()) - len(text)
    return num_bytes


def sealed_item(request_id: str, content: Content, seal: TenantSeal) -> Item:
    """Return the item with the summary that the model has written. Raises APIError if there is none."""
    summary = "".join(str(block.text) for block in content.blocks if isinstance(block, TextBlock)).strip()
    if not summary:
        message = "The model has written no summary of `input`. Its tokens are counted all the same."
        raise invalid(message, "input", code="no_summary")
    return {"id": f"cmp_{request_id}", "type": "compaction", "encrypted_content": seal.seal(summary)}


class CompactionReply(Reply):
    keeps_texts = True

    def __init__(self, wanted: GenerationRequest, request_id: str, kept: Sequence[Item], seal: TenantSeal) -> None:
        super().__init__(wanted, f"resp_{request_id}")
        self._request_id = request_id
        self._created_at = int(time.time())
        self._kept = kept
        self._seal = seal

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        item = sealed_item(self._request_id, transcript.content(0), self._seal)
        body = {
            "id": self.answer_id,
            "object": "response.compaction",
            "created_at": self._created_at,
            "output": [],
            "usage": response_usage(
                openai_usage(record, with_tiers=self.wanted.delivery.with_tiers, image_tokens=self.wanted.image_tokens)
            ),
        }
        return with_items(body, (*self._kept, item))
