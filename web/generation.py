"""What a request for tokens asks for, whichever API it came through.

Each API has a reader of its own (`openai/`, `anthropic/`) that checks a body field by field and makes one
`GenerationRequest`, from which the message to the tokenizer is made; nothing below the web layer checks it again.
"""

from __future__ import annotations

import attrs

from quipu.actors.front import ServingInfo
from quipu.actors.messages import Encode, Prompt, SamplingParams
from quipu.web.errors import not_found
from quipu.web.fields import Fields

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096


@attrs.frozen
class GenerationRequest:
    """A request that was found servable as far as its body tells."""

    model: str
    """The name by which the client asked for it."""
    prompts: tuple[Prompt, ...]
    prompt_param: str
    num_choices: int
    max_tokens: int | None
    max_tokens_param: str
    sampling: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    priority: int
    cache_salt: str

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    def encode(self, request_id: str, domain: str) -> Encode:
        """The message that starts it."""
        return Encode(
            request_id=request_id,
            prompts=self.prompts,
            num_choices=self.num_choices,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            include_stop=self.include_stop,
            skip_special_tokens=self.skip_special_tokens,
            domain=domain,
            prompt_param=self.prompt_param,
            max_tokens_param=self.max_tokens_param,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


def read_model(fields: Fields, info: ServingInfo) -> str:
    """The model asked for. Raises APIError: 404 where it is not served here."""
    model = fields.text("model")
    if model not in info.model_names:
        raise not_found("The model does not exist on this server.", "model", "model_not_found")
    return model
