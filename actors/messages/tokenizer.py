"""Messages to the tokenizer, from request handlers."""

from __future__ import annotations

import attrs

from quipu.kernels.step_types import SequenceKind

from .grammar import GrammarSpec
from .handler import PromptOutlet
from .output import OutputRules
from .prompts import Prompt, Truncation
from .sampling import SamplingParams


@attrs.frozen
class Encode:
    """Encode a request's prompts and submit them, one sequence per (prompt, choice)."""

    request_id: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    max_tokens: int | None
    """None: as many as the context has room for."""
    sampling: SamplingParams
    """Its `max_tokens` is replaced by what the prompt leaves room for."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    domain: str
    """The cache domain, from the authenticated tenant: part of every block key, and the tenant under `fair`."""
    prompt_param: str
    """The field with the prompt, for error messages: `prompt` or `messages`."""
    max_tokens_param: str
    priority: int = 0
    """Lower is served first under `--scheduling-policy priority`."""
    is_batch: bool = False
    """Nobody waits for it: every other request is served first, under each policy."""
    affinity: bytes = b""
    """Affinity key: near-ties between engines go to the one that served this client last. Empty: there is none."""
    cache_salt: str = ""
    """Subdivides the domain: prompts share blocks only with those of the same salt."""
    add_special_tokens: bool = True
    """Put what the tokenizer adds, such as a beginning of sequence, around texts."""
    echo: bool = False
    """Each choice's text begins with its prompt. `max_tokens` may then be 0."""
    bad_words: tuple[str, ...] = ()
    """Strings that no output may contain. The tokenizer adds them to the sampling rules."""
    output: OutputRules | None = None
    """How reasoning and calls are told from text. None: all of the output is text."""
    with_token_ids: bool = False
    """The client wants the ids of its prompts' and its output's tokens."""
    grammar: GrammarSpec | None = None
    """What the output, after its reasoning, has to look like. None: anything."""
    thinking_budget: int | None = None
    """After this many tokens of reasoning, the model is made to close it. None: no limit."""
    prediction: str = ""
    """Text that the client expects the output to repeat: drafts for speculative decoding."""
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    """Digest of the adapter whose weights are added to the model's. Part of every block key. Empty: there is none."""
    system_param: str = ""
    """The field with a chat's system message, if that is a separate field."""
    truncation: Truncation | None = None
    """None: a prompt that is too long is refused."""
    least_room: int | None = None
    """The output may be limited to what the prompt leaves room for, if that is this many tokens. None: a prompt that
    leaves less than `max_tokens` is refused."""


@attrs.frozen
class CountTokens:
    """Count a prompt's tokens. Neither the accountant nor the engine is involved."""

    prompt: Prompt
    prompt_param: str
    outlet: PromptOutlet
    tenant: str = ""
    """The client's tenant, for queues that are fair among tenants."""


@attrs.frozen
class KeyPrompt:
    """Encode a request's only prompt and compute its block keys, as for a sequence that is not submitted."""

    request: Encode
    outlet: PromptOutlet

    @property
    def prompt_param(self) -> str:
        return self.request.prompt_param


@attrs.frozen
class ReadPrompt:
    """Encode a prompt for its client to see. Neither the accountant nor the engine is involved."""

    prompt: Prompt
    prompt_param: str
    outlet: PromptOutlet
    tenant: str = ""
    add_special_tokens: bool = True
    """Those that the tokenizer puts around a text, such as a beginning of sequence."""
    with_text: bool = False
    with_names: bool = False
    """The client wants each token as the vocabulary spells it."""
    truncation: Truncation | None = None


PromptQuestion = CountTokens | KeyPrompt | ReadPrompt
