"""Exceptions raised while a prompt is encoded, and the errors that its client gets for them."""

from __future__ import annotations

from ..messages.outcomes import ErrorKind, RequestError
from ..shared.fair_queue import QueueFull as QueueFull
from ..shared.tokenizers_library import LibraryPanic
from .chat_template import TemplateError


class WorkerUnavailable(Exception):
    """No worker process could be started: no memory, no descriptors or no time. The client may retry."""


class ImageRefused(Exception):
    """An image that is not served. `error` is for its client."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


OVERLOADED = RequestError(ErrorKind.OVERLOADED, "Too many prompts are waiting to be tokenized. Please try again later.")
TOKENIZER_FAILED = RequestError(ErrorKind.INTERNAL, "The prompt could not be tokenized.")


def client_error(error: Exception, prompt_param: str) -> RequestError | None:
    """Return what to tell the client about an exception of a `PromptEncoder`, or None if it is a bug."""
    match error:
        case TemplateError():
            return RequestError(ErrorKind.INVALID, str(error), prompt_param)
        case ImageRefused():
            return error.error
        case LibraryPanic():
            message = f"Invalid value for `{prompt_param}`: this model's tokenizer fails on it."
            return RequestError(ErrorKind.INVALID, message, prompt_param)
        case QueueFull() | WorkerUnavailable():
            return OVERLOADED
        case _:
            return None
