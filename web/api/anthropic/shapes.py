"""The fields that the readers of this folder know, so that others can be reported as ignored (`../ignored_fields.py`).

A field is listed if it is read, refused, or merely passed along by the API's own clients, such as the `signature` of a
thinking block. `tests/web/api/test_ignored_fields.py` checks that every field that is read is listed.
"""

from __future__ import annotations

from ..foreign_table import FOREIGN
from ..ignored_fields import Shape
from ..sampling import SAMPLING_NAMES
from .body import OTHER_ENDPOINTS_FIELDS, UNSUPPORTED
from .cache_control import NAME

_INDEX = ".{}"
_CACHE_CONTROL = Shape(known=frozenset({"type", "ttl"}))
_TEXT = Shape(known=frozenset({NAME, "text", "type"}), objects={NAME: _CACHE_CONTROL})
_BLOCK = Shape(
    known=frozenset(
        {
            NAME,
            "caller",
            "content",
            "context",
            "data",
            "id",
            "input",
            "is_error",
            "name",
            "signature",
            "source",
            "text",
            "thinking",
            "title",
            "tool_use_id",
            "type",
        }
    ),
    objects={NAME: _CACHE_CONTROL},
    lists={"content": _TEXT},
    index=_INDEX,
)
_TOOL = Shape(
    known=frozenset({NAME, "description", "input_schema", "name", "strict", "type"}), objects={NAME: _CACHE_CONTROL}
)
_FORMAT = Shape(known=frozenset({"schema", "type"}))
MESSAGES_SHAPE = Shape(
    known=frozenset(
        {
            NAME,
            "cache_salt",
            "chat_template_kwargs",
            "max_tokens",
            "messages",
            "metadata",
            "model",
            "output_config",
            "output_format",
            "priority",
            "stop_sequences",
            "stream",
            "system",
            "thinking",
            "thread",
            "tool_choice",
            "tools",
            *FOREIGN,
            *UNSUPPORTED,
            *OTHER_ENDPOINTS_FIELDS,
            *SAMPLING_NAMES,
        }
    ),
    objects={
        NAME: _CACHE_CONTROL,
        "metadata": Shape(known=frozenset({"user_id"})),
        "output_config": Shape(known=frozenset({"effort", "format"}), objects={"format": _FORMAT}),
        "output_format": _FORMAT,
        "thinking": Shape(known=frozenset({"budget_tokens", "type"})),
        "tool_choice": Shape(known=frozenset({"disable_parallel_tool_use", "name", "type"})),
    },
    lists={
        "messages": Shape(known=frozenset({"content", "role"}), lists={"content": _BLOCK}, index=_INDEX),
        "system": _TEXT,
        "tools": _TOOL,
    },
    index=_INDEX,
)
