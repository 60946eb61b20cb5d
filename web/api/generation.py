"""A generation request, independent of the API through which it came.

The readers of each API check a body field by field and return a `GenerationRequest`, from which the message to the
tokenizer is made. Nothing below the web layer checks it again.

A client that names itself (`prompt_cache_key` or `user` of OpenAI's APIs, `metadata.user_id` of Anthropic's) is served
by the engine that served it last if others are hardly better. What must always hold: its name is a hint, and part of no
block key and no count; no value of one tenant has the digest of another tenant's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import attrs

from quipu.actors.config.declarations import EMBEDDINGS, POOLED
from quipu.actors.config.pooling_config import Task
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import bad_value, invalid, no_model, quoted, unavailable
from ..request.principal import Principal
from .fields import Fields

MAX_AFFINITY_CHARS = 4096
"""Characters of a value that are looked at."""
_DIGEST_BYTES = 16
_PERSON = b"quipu affinity"
_OWN_GROUP = "functions"


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
        """Number of top logprobs that the engine computes for each prompt token, for either use."""
        return max((n for n in (self.prompt, self.output if self.echo else None) if n is not None), default=None)


NO_SCORES = WantedScores()


@attrs.frozen
class TokenLimit:
    """The maximum number of tokens of a choice, and the field that sets it."""

    num_tokens: int | None
    param: str


@attrs.frozen(kw_only=True)
class Delivery:
    stream: bool = False
    include_usage: bool = False
    """Every chunk has a `usage` field, and a last chunk carries the full usage."""
    continuous_usage: bool = False
    """Every chunk carries the usage so far. Only with `include_usage`, as in vLLM."""
    with_tiers: bool = False
    """Cached tokens are split by tier."""


@attrs.frozen
class NamespacedTool:
    """A tool of a group, as its client knows it."""

    namespace: str
    name: str

    @property
    def flat_name(self) -> str:
        """Return the name by which the model knows it. Codex puts its own tools into a group `functions`."""
        return self.name if self.namespace == _OWN_GROUP else f"{self.namespace}__{self.name}"


@attrs.frozen
class ReplyRules:
    """How calls and reasoning are written."""

    names_reasoning: bool = False
    """The message of a chat has the fields of reasoning even if there was none, as vLLM's does."""
    legacy_functions: bool = False
    """The client sent `functions`: a call is a `function_call` of the message."""
    custom_tools: frozenset[str] = frozenset()
    """Tools whose only argument, `input`, is free text; the client receives the text alone."""
    namespaces: Mapping[str, NamespacedTool] = attrs.field(factory=dict)
    """Tools of groups."""


NO_RULES = ReplyRules()


@attrs.frozen(kw_only=True)
class GenerationRequest(Encode):
    """A request whose body has been checked: what the tokenizer is told of it, and how it is answered."""

    request_id: str = ""
    """Known, like the domain, when the request is opened."""
    domain: str = ""
    model: str
    """The model name that the client sent."""
    affinity_key: str = ""
    scores: WantedScores = NO_SCORES
    include_reasoning: bool = True
    """Reasoning is part of the response; it is counted in any case."""
    is_prewarm: bool = False
    """Only the prompts are to be computed."""
    delivery: Delivery = attrs.field(factory=Delivery)
    rules: ReplyRules = NO_RULES
    image_tokens: int | None = None
    """Tokens of the prompt that stand for images. None: it has none."""
    unused_fields: tuple[str, ...] = ()
    """Paths of fields that were read and have no effect on this model; the client is told."""
    num_prompts: int = attrs.field(default=attrs.Factory(lambda self: len(self.prompts), takes_self=True))

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_choices

    def without_prompts(self) -> GenerationRequest:
        """Return a copy without the prompts, which the response does not need."""
        return attrs.evolve(self, prompts=())

    def prewarmed(self, param: str) -> GenerationRequest:
        """Return a request that brings the same prompts into the cache and generates nothing.

        `param` names the field that asks for it. Raises APIError for what would be the output all the same.
        """
        for name, is_wanted in (("echo", self.scores.echo), ("prompt_logprobs", self.scores.prompt is not None)):
            if is_wanted:
                raise bad_value(param, f"not allowed together with `{name}`")
        return attrs.evolve(self, max_tokens=0, grammar=None, thinking_budget=None, prediction="", is_prewarm=True)

    def encode(self, request_id: str, domain: str) -> Encode:
        """Return the message that starts the request."""
        told = {field.name: getattr(self, field.name) for field in attrs.fields(Encode)}
        affinity = affinity_of(domain, self.affinity_key)
        return Encode(**{**told, "request_id": request_id, "domain": domain, "affinity": affinity})


def _serves_one(info: ServingInfo) -> bool:
    """Return whether there is only one model, which requests need not name."""
    return info.has_engines and not info.passed_on


def read_model(fields: Fields, info: ServingInfo) -> str:
    """Return the requested model, or the only one. Raises APIError, 404 if it is not served here."""
    model = fields.optional_text("model") or (info.model_names[0] if _serves_one(info) else fields.text("model"))
    if not info.has_engines and not info.passed_on:
        raise unavailable("No upstream server has answered yet, so that it is not known which models there are.")
    if model in info.passed_on:
        message = (
            f"The model {quoted(model)} is served by another server, to which this one passes on only "
            "`/v1/chat/completions` and `/v1/completions`."
        )
        raise invalid(message, "model", "not_passed_on")
    if model not in info.model_names and model not in info.adapters:
        raise no_model(model, info.all_names)
    return model


def visible_to(principal: Principal, info: ServingInfo) -> ServingInfo:
    """Return what is served to a client: without the adapters that its key may not use."""
    if principal.adapters is None or not info.adapters:
        return info
    allowed = {name: adapter for name, adapter in info.adapters.items() if name in principal.adapters}
    return attrs.evolve(info, adapters=allowed)


_TASKS = {
    Task.GENERATE: "generates text",
    Task.EMBED: "makes embeddings, and scores by their similarity",
    Task.SCORE: "makes a reranker's scores",
}


def check_task(endpoint: str, info: ServingInfo) -> None:
    """Raise APIError if this server was not started for what an endpoint does."""
    wanted = (Task.EMBED,) if endpoint == EMBEDDINGS else (Task.EMBED, Task.SCORE)
    if endpoint not in POOLED:
        wanted = (Task.GENERATE,)
    if info.task not in wanted:
        flags = " or ".join(f"`--task {task}`" for task in wanted)
        message = f"This server {_TASKS[info.task]}: `{endpoint}` needs one that was started with {flags}."
        raise invalid(message, code="task_not_served")


def check_priority(priority: int, *, is_allowed: bool) -> None:
    """Raise APIError for a priority other than 0 if the operator does not allow it."""
    if priority and not is_allowed:
        message = (
            "not allowed unless the server is started with --allow-client-priority, or the API key is marked with "
            "`priority = true` in the key file"
        )
        raise bad_value("priority", message, "priority_not_allowed")


def read_affinity_key(fields: Fields, *names: str) -> str:
    """Return the first of these fields that is not empty, cut, or an empty string. Raises APIError."""
    values = [fields.optional_text(name) for name in names]
    return next((value[:MAX_AFFINITY_CHARS] for value in values if value), "")


def affinity_of(domain: str, key: str) -> bytes:
    """Return the 16 bytes that stand for a client within its cache domain; none for an empty key."""
    if not key:
        return b""
    tenant = domain.encode()
    digest = hashlib.blake2b(b"%d:" % len(tenant), digest_size=_DIGEST_BYTES, person=_PERSON)
    digest.update(tenant)
    digest.update(key.encode())
    return digest.digest()
