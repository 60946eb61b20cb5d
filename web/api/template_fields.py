"""Fields of a request that go to the chat template: its variables, documents, and how much the model is to reason.

Used by every endpoint with a chat. Each API has fields of its own for reasoning, which become variables of the template
and a budget. What must always hold: a variable in `chat_template_kwargs` takes precedence over the fields that stand
for it; a field that this model cannot honour is accepted and reported to the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quipu.actors.messages.output import OutputFormat

from ..request.errors import bad_value
from .body_shapes import MAX_DOCUMENT_FIELDS, MAX_TEMPLATE_KWARGS, RESERVED_KWARGS
from .fields import Fields, wrong_type
from .pace import Pace

NO_BUDGET = -1
_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off: Qwen's and DeepSeek's."""


class Thinking:
    """What a request asks of the model's reasoning. A later call takes precedence."""

    def __init__(self, output: OutputFormat) -> None:
        self.variables: dict[str, Any] = {}
        """Of the chat template."""
        self.budget: int | None = None
        """Tokens of reasoning after which the model is made to close it."""
        self.unused: list[str] = []
        """Fields without effect."""
        self._output = output

    def switch(self, is_on: bool, param: str) -> None:
        is_honoured = self._set(dict.fromkeys(_SWITCHES, is_on))
        if not is_honoured and not (is_on and self._output.reasoning_tags is not None):
            self.unused.append(param)

    def limit(self, num_tokens: int, param: str) -> None:
        if self._output.reasoning_tags is None:
            self.unused.append(param)
        else:
            self.budget = num_tokens

    def read_effort(self, fields: Fields, name: str, *, is_switch: bool = True) -> None:
        """Read how much the model is to reason. `is_switch`: it also says whether to. Raises APIError."""
        effort = fields.optional_text(name)
        if effort is None:
            return
        switches = dict.fromkeys(_SWITCHES, effort != "none") if is_switch else {}
        if not self._set({**switches, "reasoning_effort": effort}):
            self.unused.append(fields.param(name))

    def _set(self, values: dict[str, Any]) -> bool:
        """Set those variables that the template reads. Return whether there are any."""
        read = {name: value for name, value in values.items() if name in self._output.template_variables}
        self.variables |= read
        return bool(read)


def read_template_kwargs(fields: Fields, thinking: Thinking) -> Mapping[str, Any]:
    """Return the template's variables: those that `thinking` sets, and the client's own. Raises APIError."""
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is None:
        return thinking.variables
    if type(kwargs) is not dict:
        raise wrong_type("chat_template_kwargs", "an object")
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise bad_value("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_KWARGS} entries")
    if not RESERVED_KWARGS.isdisjoint(kwargs):
        raise bad_value("chat_template_kwargs", f"must not set {', '.join(sorted(RESERVED_KWARGS))}")
    return {**thinking.variables, **kwargs}


def read_switch_and_budget(fields: Fields, thinking: Thinking) -> None:
    """Read `enable_thinking` and `thinking_token_budget`, as in SGLang and vLLM. Raises APIError."""
    if fields.get("enable_thinking") is not None:
        thinking.switch(fields.flag("enable_thinking"), "enable_thinking")
    budget = fields.integer("thinking_token_budget")
    if budget is not None and budget != NO_BUDGET:
        thinking.limit(budget, "thinking_token_budget")


async def read_documents(fields: Fields, pace: Pace) -> tuple[Mapping[str, str], ...]:
    """Return `documents`, which some templates show for retrieval-augmented generation. Raises APIError."""
    read = []
    for document in fields.objects("documents", "a list of objects", pace.check_parts, each="an object of strings"):
        if len(document.values) > MAX_DOCUMENT_FIELDS:
            raise bad_value(document.path, f"must have at most {MAX_DOCUMENT_FIELDS} entries")
        if any(type(text) is not str for text in document.values.values()):
            raise wrong_type(document.path, "an object of strings")
        await pace.tick(1 + len(document.values))
        read.append(document.values)
    return tuple(read)
