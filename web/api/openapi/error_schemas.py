"""The schemas of errors: OpenAI's, and Anthropic's on the paths of its API (`web/request/errors.py`)."""

from __future__ import annotations

from ..operation import ANYTHING, TEXT_VALUE, Named, always, maybe, record

OPENAI_ERROR = Named(
    "Error",
    record(
        {
            "error": record(
                {
                    "message": TEXT_VALUE,
                    "type": TEXT_VALUE,
                    "param": maybe(TEXT_VALUE),
                    "code": maybe(TEXT_VALUE),
                }
            )
        }
    ),
)
ANTHROPIC_ERROR = Named(
    "AnthropicError",
    record(
        {
            "type": always("error"),
            "error": record({"type": TEXT_VALUE, "message": TEXT_VALUE}, {"details": ANYTHING}),
            "request_id": maybe(TEXT_VALUE),
        }
    ),
)
