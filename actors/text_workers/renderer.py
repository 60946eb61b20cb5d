"""The interface for rendering chats, and an implementation that renders in this process.

`chat_pool.py` has the one used in a real server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jinja2
import trio

from ..messages.prompts import ChatPrompt
from ..shared.checkpoint import CheckpointError
from ..tokenizer.chat_template import INVALID_UNICODE, ChatTemplate, RenderedChat, TemplateError
from ..tokenizer.template_source import TemplateSource

MAX_CHARACTERS = 16 << 20
"""The longest rendered chat for any context: twice the largest request body."""

NO_TEMPLATE = "This model has no chat template. Use /v1/completions instead."


class Renderer(Protocol):
    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None:
        """Run until cancelled, and report as started once chats can be rendered. Raises CheckpointError."""
        ...

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        """Return a chat's text. Rendering ends soon after this is cancelled.

        Raises TemplateError, ChatTooLong, and QueueFull if too many chats are waiting.
        """
        ...


MakeRenderer = Callable[[TemplateSource | None, float], Renderer]
"""Called with a checkpoint's template and the time limit for one chat, in seconds."""


def does_not_compile(template: TemplateSource, reason: str) -> CheckpointError:
    return CheckpointError(f"{template.origin}: the chat template does not compile: {reason}")


class InlineRenderer:
    """Renders in this process, for tests and simulations, which trust their templates."""

    def __init__(
        self,
        template: TemplateSource | None,
        timeout_s: float = 0.0,
        *,
        before: Callable[[ChatPrompt], object] = lambda chat: None,
    ) -> None:
        """`before` is called with every chat and may raise instead of the template. Raises CheckpointError."""
        self._before = before
        self._template = None
        if template is None:
            return
        try:
            self._template = ChatTemplate(
                template.source, template.variables, template.tool_source, lists_parts=template.lists_parts
            )
        except jinja2.TemplateError as error:
            raise does_not_compile(template, str(error)) from error

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        self._before(chat)
        if self._template is None:
            raise TemplateError(NO_TEMPLATE)
        rendered = self._template.render(chat, max_characters)
        try:
            rendered.text.encode()
        except UnicodeEncodeError:
            raise TemplateError(INVALID_UNICODE) from None
        return rendered
