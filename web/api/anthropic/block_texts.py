"""What a block that is not thinking, a call or a result says to the model: its text, or nothing.

    text             its text
    search_result    title, source and text
    document         title, context and text, if its source is text
    compaction       the summary that stands for earlier messages
    image, document  refused in a message; skipped in a tool's result, which the model would otherwise never see again
                     (`conversation.py` reads images of both, if the model does)
    the blocks of Anthropic's own tools (`server_tool_use`, `web_search_tool_result`, `mcp_tool_use`, ...): skipped

Used by `conversation.py`. What must always hold: what is skipped is named in the response's header; what is refused is
refused with the path of its field.
"""

from __future__ import annotations

from ...request.errors import APIError, bad_value, unsupported_value
from ..fields import Fields, missing, unsupported_type
from ..message_shapes import NAMING, OF_SERVERS, SKIPPED
from ..pace import Pace

_ELSEWHERE = {
    "document": "are only read if the type of their `source` is `text` or `content`",
    "image": "belong in messages of users and results of tools",
    "tool_result": "belong in messages of users",
    **dict.fromkeys(("redacted_thinking", "thinking", "tool_use"), "belong in messages of the assistant"),
}
"""Types of blocks that are read, but not everywhere."""


def is_skipped(block: Fields) -> bool:
    """Return whether a block belongs to a tool or feature of Anthropic's servers.

    One that names a deferred tool says something nevertheless (`deferred_tools.py`).
    """
    kind = block.get("type")
    return type(kind) is str and (kind in SKIPPED or kind in NAMING or kind.endswith(OF_SERVERS))


def blocks_of(fields: Fields, name: str, pace: Pace) -> list[Fields]:
    """Return the blocks of one field, and count them. Raises APIError."""
    return list(fields.objects(name, "a string or a list of blocks", pace.check_parts))


async def read_text(block: Fields, pace: Pace, skipped: list[str] | None) -> str:
    """Return what is rendered of a block. Raises APIError.

    `skipped` takes the paths of images and the like in a tool's result; None: the block is in a message, where they are
    refused.
    """
    match block.text("type"):
        case "text":
            return block.text("text")
        case "search_result":
            return "\n".join(
                [block.text("title"), block.text("source"), await _read_inner(block, "content", pace, skipped)]
            )
        case "document" if (source := block.fields("source")).get("type") in ("text", "content"):
            name = "data" if source.get("type") == "text" else "content"
            told = [text for field in ("title", "context") if (text := block.optional_text(field)) is not None]
            return "\n".join([*told, await _read_inner(source, name, pace, skipped)])
        case "compaction":
            return block.optional_text("content") or ""
        case "image" | "document" if skipped is not None:
            skipped.append(block.path)
            return ""
    raise _unread(block)


def _unread(block: Fields) -> APIError:
    """Return the error for a block that is not read where it is."""
    kind = block.text("type")
    if kind not in _ELSEWHERE:
        return unsupported_type(block, "blocks")
    return unsupported_value(block.param("type"), f"blocks of type `{kind}` {_ELSEWHERE[kind]}")


async def _read_inner(fields: Fields, name: str, pace: Pace, skipped: list[str] | None) -> str:
    """Return a string, or the joined texts of a list of text blocks and images."""
    value = fields.get(name)
    if value is None:
        raise missing(fields.param(name))
    if type(value) is str:
        return value
    texts = []
    for block in blocks_of(fields, name, pace):
        await pace.tick()
        if block.text("type") not in ("text", "image"):
            raise bad_value(block.param("type"), "must be `text`")
        texts.append(await read_text(block, pace, skipped))
    return "".join(texts)


def text_of(block: Fields) -> str:
    """Return the text of a text block. Raises APIError for any other."""
    if block.text("type") != "text":
        raise _unread(block)
    return block.text("text")
