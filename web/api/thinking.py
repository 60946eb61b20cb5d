"""What a request asks of the model's reasoning: on or off, how much, and for how many tokens at most.

Each API has fields of its own for this. They become variables of the chat template and a budget. A field that this
model cannot honour is accepted without effect and reported to the client.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.output import OutputFormat

from .fields import Fields

_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off: Qwen's and DeepSeek's."""


class Thinking:
    """What has been asked so far. A later call takes precedence."""

    def __init__(self, output: OutputFormat) -> None:
        self.variables: dict[str, Any] = {}
        """Of the chat template."""
        self.budget: int | None = None
        """Tokens of reasoning after which the model is made to close it."""
        self.unused: list[str] = []
        """Fields without effect."""
        self._output = output

    def switch(self, is_on: bool, param: str) -> None:
        """Switch reasoning on or off."""
        is_honoured = self._set(dict.fromkeys(_SWITCHES, is_on))
        if not is_honoured and not (is_on and self._output.reasoning_tags is not None):
            self.unused.append(param)

    def limit(self, num_tokens: int, param: str) -> None:
        """Limit the tokens of reasoning."""
        if self._output.reasoning_tags is None:
            self.unused.append(param)
        else:
            self.budget = num_tokens

    def read_effort(self, fields: Fields, name: str, *, is_switch: bool = True) -> None:
        """Read how much the model is to reason. `is_switch`: it also says whether to. Raises APIError."""
        effort, param = fields.optional_text(name), fields.param(name)
        if effort is None:
            return
        switches = dict.fromkeys(_SWITCHES, effort != "none") if is_switch else {}
        if not self._set({**switches, "reasoning_effort": effort}):
            self.unused.append(param)

    def _set(self, values: dict[str, Any]) -> bool:
        """Set those variables that the template reads. Return whether there are any."""
        read = {name: value for name, value in values.items() if name in self._output.template_variables}
        self.variables |= read
        return bool(read)
