"""How a request is sampled: fields of a request's body, under the names of vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Sampling of one request. None: the default of the model, or of the endpoint.

    The fields are those of `/v1/completions` and `/v1/chat/completions` (docs/use/sampling.md), which check them: an
    invalid value raises `RequestError` when a request is made.
    """

    n: int | None = None
    max_tokens: int | None = None
    """None: 16 for `generate`, and whatever the context has room for in `chat`."""
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    """Number of top logprobs for each output token."""
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """`{"json": schema}`, `{"regex": …}`, `{"choice": […]}` or `{"grammar": …}` (docs/use/structured-output.md)."""

    def fields(self, *, is_chat: bool) -> dict[str, Any]:
        """Return the fields of a body."""
        given = {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if is_chat and self.logprobs is not None:
            given["logprobs"], given["top_logprobs"] = True, self.logprobs
        for name in ("stop", "stop_token_ids"):
            if isinstance(given.get(name), Sequence) and not isinstance(given[name], str):
                given[name] = list(given[name])
        return given
