"""A generation request, independent of the API through which it came.

Each API has readers (`openai/`, `anthropic/`) that check a body field by field and return a `GenerationRequest`, from
which the message to the tokenizer is made. Nothing below the web layer checks it again.
"""

from __future__ import annotations

import attrs

from quipu.actors.messages.grammar import GrammarSpec
from quipu.actors.messages.output import OutputRules
from quipu.actors.messages.prompts import Prompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import bad_value, invalid, no_model, quoted, unavailable
from .affinity import affinity_of
from .fields import Fields
from .reply_rules import NO_RULES, ReplyRules


@attrs.frozen
class WantedScores:
    """Which logprobs a client wants."""

    output: int | None = None
    """Number of top logprobs for each output token. None: no logprobs."""
    prompt: int | None = None
    """Number of top logprobs for each prompt token. None: no prompt logprobs."""
    echo: bool = False
    """Begin the text and the logprobs with the prompt."""
    as_token_ids: bool = False
    """Logprobs name tokens by their ids instead of their texts, of which several tokens may have the same."""

    @property
    def prompt_in_engine(self) -> int | None:
        """Number of top logprobs that the engine has to compute for each prompt token, for either use."""
        return max((n for n in (self.prompt, self.output if self.echo else None) if n is not None), default=None)


NO_SCORES = WantedScores()


@attrs.frozen
class GenerationRequest:
    """A request whose body has been checked."""

    model: str
    """The model name that the client sent."""
    prompts: tuple[Prompt, ...]
    prompt_param: str
    num_choices: int
    max_tokens: int | None
    max_tokens_param: str
    sampling: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    affinity_key: str = ""
    """What the client calls itself; empty: nothing."""
    scores: WantedScores = NO_SCORES
    bad_words: tuple[str, ...] = ()
    system_param: str = ""
    output: OutputRules | None = None
    """How reasoning and calls are told from text. None: all of the output is text."""
    include_reasoning: bool = True
    """Reasoning is part of the response; it is counted in any case."""
    with_token_ids: bool = False
    """The response has the ids of its prompts' and its output's tokens."""
    grammar: GrammarSpec | None = None
    """What the output, after its reasoning, has to look like. None: anything."""
    thinking_budget: int | None = None
    """After this many tokens of reasoning, the model is made to close it. None: no limit."""
    is_prewarm: bool = False
    """Only the prompts are to be computed."""
    rules: ReplyRules = NO_RULES
    unused_fields: tuple[str, ...] = ()
    """Paths of fields that were read and have no effect on this model; the client is told."""
    num_prompts: int = attrs.field(default=attrs.Factory(lambda self: len(self.prompts), takes_self=True))

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_choices

    def without_prompts(self) -> GenerationRequest:
        """Return a copy without the prompts, which may be long and need not be kept while the response is made."""
        return attrs.evolve(self, prompts=())

    def prewarmed(self, param: str) -> GenerationRequest:
        """Return a request that brings the same prompts into the cache and generates nothing.

        `param` names the field that asks for it. Raises APIError for what would be the output all the same.
        """
        for name, is_wanted in (("echo", self.scores.echo), ("prompt_logprobs", self.scores.prompt is not None)):
            if is_wanted:
                raise bad_value(param, f"not allowed together with `{name}`")
        return attrs.evolve(self, max_tokens=0, grammar=None, thinking_budget=None, is_prewarm=True)

    def encode(self, request_id: str, domain: str) -> Encode:
        """Return the message that starts the request."""
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
            affinity=affinity_of(domain, self.affinity_key),
            cache_salt=self.cache_salt,
            echo=self.scores.echo,
            bad_words=self.bad_words,
            system_param=self.system_param,
            output=self.output,
            with_token_ids=self.with_token_ids,
            grammar=self.grammar,
            thinking_budget=self.thinking_budget,
        )


def _serves_one(info: ServingInfo) -> bool:
    """Whether there is one model, under whatever names, so that requests need not name it."""
    return info.has_engines and not info.passed_on


def read_model(fields: Fields, info: ServingInfo) -> str:
    """Return the requested model, or the only one. Raises APIError, 404 if it is not served here."""
    model = fields.text("model") if fields.get("model") or not _serves_one(info) else info.model_names[0]
    if not info.has_engines and not info.passed_on:
        raise unavailable("No upstream server has answered yet, so that it is not known which models there are.")
    if model in info.passed_on:
        message = (
            f"The model {quoted(model)} is served by another server, to which this one passes on only "
            "`/v1/chat/completions` and `/v1/completions`."
        )
        raise invalid(message, "model", "not_passed_on")
    if model not in info.model_names:
        raise no_model(model, info.model_names)
    return model


def check_priority(priority: int, *, is_allowed: bool) -> None:
    """Raise APIError for a priority other than 0 if the operator does not allow it."""
    if priority and not is_allowed:
        message = (
            "not allowed unless the server is started with --allow-client-priority, or the API key is marked with "
            "`priority = true` in the key file"
        )
        raise bad_value("priority", message, "priority_not_allowed")
