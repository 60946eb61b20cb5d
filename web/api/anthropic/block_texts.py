"""What a block that is not thinking, a call or a result says to the model: its text, or nothing.

    text             its text
    search_result    title, source and text
    document         title, context and text, if its source is text
    compaction       the summary that stands for earlier messages
    image, document  refused in a message; skipped in a tool's result, which the model would otherwise never see again
    the blocks of Anthropic's own tools (`server_tool_use`, `web_search_tool_result`, `mcp_tool_use`, ...): skipped

Used by `conversation.py`. What must always hold: what is skipped is named in the response's header; what is refused is
refused with the path of its field.
"""

from __future__ import annotations

from ...request.errors import APIError, bad_value, unsupported_value
from ..fields import Fields, missing
from ..pace import Pace

_SKIPPED = frozenset(
    {
        "browser_state",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "tool_addition",
        "tool_reference",
        "tool_removal",
    }
)
_OF_SERVERS = ("_tool_use", "_tool_result")
"""Ends of the types of calls that Anthropic's servers carry out, and of their results."""
_MAX_TYPE_CHARS = 40


def is_skipped(block: Fields) -> bool:
    """Whether a block belongs to a tool or feature of Anthropic's servers."""
    kind = block.get("type")
    return type(kind) is str and (kind in _SKIPPED or kind.endswith(_OF_SERVERS))


def blocks_of(fields: Fields, name: str, pace: Pace) -> list[Fields]:
    """Return the blocks of one field, and count them. Raises APIError."""
    return list(fields.objects(name, "a string or a list of blocks", pace.check_parts))


class BlockTexts:
    """Reads the text of one block, and of the blocks in it."""

    def __init__(self, pace: Pace, *, is_result: bool) -> None:
        self._pace = pace
        self._is_result = is_result
        self.unused: list[str] = []
        """Paths of blocks without a text that the model could read."""

    async def read(self, block: Fields) -> str:
        """Return what is rendered of a block. Raises APIError."""
        match block.text("type"):
            case "text":
                return block.text("text")
            case "search_result":
                texts = [block.text("title"), block.text("source"), await self._inner(block, "content")]
                return "\n".join(texts)
            case "document" if (source := block.fields("source")).get("type") in ("text", "content"):
                name = "data" if source.get("type") == "text" else "content"
                about = [block.optional_text(field) for field in ("title", "context")]
                told = [text for text in about if text is not None]
                return "\n".join([*told, await self._inner(source, name)])
            case "compaction":
                return block.optional_text("content") or ""
            case "image" | "document" if self._is_result:
                self.unused.append(block.path)
                return ""
        raise _unsupported(block)

    async def _inner(self, fields: Fields, name: str) -> str:
        """Return a string, or the joined texts of a list of text blocks and images."""
        value = fields.get(name)
        if value is None:
            raise missing(fields.param(name))
        if type(value) is str:
            return value
        texts = []
        for block in blocks_of(fields, name, self._pace):
            await self._pace.tick()
            if block.text("type") not in ("text", "image"):
                raise bad_value(block.param("type"), "must be `text`")
            texts.append(await self.read(block))
        return "".join(texts)


def text_of(block: Fields) -> str:
    """Return the text of a text block. Raises APIError for any other."""
    if block.text("type") != "text":
        raise _unsupported(block)
    return block.text("text")


def _unsupported(block: Fields) -> APIError:
    named = block.text("type")[:_MAX_TYPE_CHARS]
    return unsupported_value(block.param("type"), f"blocks of type `{named}` are not supported here by this server")
