"""What the tokenizer receives from request handlers."""

from __future__ import annotations

import attrs

from .handler import CountOutlet
from .prompts import Prompt
from .sampling import SamplingParams


@attrs.frozen
class Encode:
    """Turn a request's prompts into sequences and submit them; one sequence per (prompt, choice)."""

    request_id: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    max_tokens: int | None
    """None: as many as the context has room for."""
    sampling: SamplingParams
    """`max_tokens` in it is replaced by what the prompt leaves room for."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    domain: str
    """The cache domain, from the authenticated tenant: part of every block key, and who is served under `fair`."""
    prompt_param: str
    """The field a prompt came in, for messages: `prompt` or `messages`."""
    max_tokens_param: str
    priority: int = 0
    """Lower is served first under `--scheduling-policy priority`."""
    cache_salt: str = ""
    """Subdivides the domain: prompts share only with those of the same salt."""
    echo: bool = False
    """Each choice's text begins with its prompt's. Then `max_tokens` may be 0."""
    bad_words: tuple[str, ...] = ()
    """What no output may hold. The tokenizer puts them into the sampling's rules."""
    system_param: str = ""
    """The field of a chat's system message, where it has one of its own."""


@attrs.frozen
class CountTokens:
    """Say how many tokens a prompt has: no account, no engine."""

    prompt: Prompt
    prompt_param: str
    outlet: CountOutlet
    tenant: str = ""
    """Who asks, for lanes that are fair among tenants."""
