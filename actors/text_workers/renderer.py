"""Who renders chats, as the tokenizer sees it, and one that does it on the spot.

`chat_pool.py` has the one that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jinja2
import trio

from ..messages.prompts import ChatPrompt
from ..shared.checkpoint import CheckpointError
from ..tokenizer.chat_template import NO_UNICODE, ChatTemplate, RenderedChat, TemplateError, TemplateSource

MAX_CHARACTERS = 16 << 20
"""Of a rendered chat, however long the context is: twice the largest body."""

NO_TEMPLATE = "this model has no chat template; use /v1/completions"


class Renderer(Protocol):
    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None:
        """Keep what renders alive until cancelled; started as soon as chats can be rendered. Raises CheckpointError."""
        ...

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        """A chat's text. When cancelled, nothing of it goes on for long.

        Raises TemplateError, TooMuchText, and Crowded where too many wait.
        """
        ...


MakeRenderer = Callable[[TemplateSource | None, float], Renderer]
"""Given a checkpoint's template, and the seconds that a chat may take."""


def does_not_compile(template: TemplateSource, reason: str) -> CheckpointError:
    return CheckpointError(f"{template.origin}: the chat template does not compile: {reason}")


class InlineRenderer:
    """Renders in this process, at once: for tests and simulations, whose templates are their own."""

    def __init__(
        self,
        template: TemplateSource | None,
        timeout_s: float = 0.0,
        *,
        before: Callable[[ChatPrompt], object] = lambda chat: None,
    ) -> None:
        """`before` hears of every chat, and may raise in the template's place. Raises CheckpointError."""
        self._before = before
        self._template = None
        if template is None:
            return
        try:
            self._template = ChatTemplate(template.source, template.variables)
        except jinja2.TemplateError as error:
            raise does_not_compile(template, str(error)) from error

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()

    async def render(self, chat: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
        self._before(chat)
        if self._template is None:
            raise TemplateError(NO_TEMPLATE)
        rendered = self._template.render(chat, max_characters)
        if not _is_valid(rendered.text):
            raise TemplateError(NO_UNICODE)
        return rendered


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
