"""One request of a simulation, as data."""

from __future__ import annotations

import attrs

BLOCK = 4
"""Tokens in a block."""
SLOT_BYTES = 8
"""Of a token, in the fake executor's cache."""
STEP_S = 0.01
FIRST_ID, NUM_IDS = 4, 120
"""The tokens that are drawn: printable characters of the tiny model's vocabulary, and bytes of others."""
TENANTS = ("ada", "bob", "cleo")
ADAPTERS = ("poet", "clerk")
"""Names of the adapters of servers that have any."""
TOOLS = ("find", "add")
"""Names of the tools that clients offer."""
ANY_LETTER = -1
"""In a script: a letter that the model draws."""
TOGETHER_S = 0.03
"""When many come to an engine, after others that have filled it."""
AFTERWARDS = 1000
"""Requests with this number and higher ones are sent when everything else is over."""


@attrs.frozen
class Mark:
    """A place in a chat up to which its client wants the prompt kept in the cache."""

    message: int
    num_chars: int
    """Of that message's content."""
    is_long: bool
    """For an hour instead of five minutes."""


@attrs.frozen(cache_hash=True)
class Arrival:
    """One request."""

    number: int
    at_s: float
    tenant: str
    prompt: tuple[int, ...]
    """The token ids, whatever is sent: they themselves, or what they are encoded from."""
    max_tokens: int
    further: tuple[tuple[int, ...], ...] = ()
    """More prompts of the same request, as token ids."""
    part: int = 0
    """Of one that is but a part of a request: which of its prompts it has."""
    is_embedded: bool = False
    """Vectors of its prompts are wanted, and no tokens."""
    text: str | None = None
    """Sent instead of the token ids."""
    chat: tuple[str, ...] = ()
    """Sent instead of the token ids: contents of the user's and the assistant's messages, in turn."""
    marks: tuple[Mark, ...] = ()
    mark_positions: tuple[int, ...] = ()
    """Prompt tokens before each of them."""
    salt: str = ""
    adapter: str = ""
    num_choices: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignores_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens are wanted with the score of each drawn one."""
    prompt_logprobs: int | None = None
    with_token_ids: bool = False
    grammar: int = 0
    """Which tokens may be drawn, by the rule of `fake_grammars.py`; 0: all."""
    script: tuple[int, ...] = ()
    """Tokens with which its answer begins, since its grammar allows no others."""
    reasons: bool = False
    """Its grammar has it reason before it answers."""
    is_amid_reasoning: bool = False
    """Its prompt has begun to reason, and its outputs go on with that."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which it has to end."""
    tools: tuple[str, ...] = ()
    """The tools that may be called: only then calls are told from text."""
    max_calls: int | None = None
    """An output ends with so many calls."""
    shows_tools: bool = False
    """The tools are part of its chat."""
    idempotency_key: str = ""
    """Of the same tenant, a later request with the same is a retry of an earlier one. Empty: it says nothing."""
    priority: int = 0
    is_batch: bool = False
    leaves_after_s: float | None = None
    """The client leaves so long after its arrival, if it still waits then."""
    read_pause_s: float = 0.0
    """How long the client waits between two looks at what has come."""
    deadline_s: float | None = None
    follows: int | None = None
    """It is sent when the request with this number has ended."""
    after_reset: bool = False
    """The cache is reset just before it is sent."""
    is_pushed_out: bool = False
    """What it has in common with earlier ones has been pushed off the device..."""
    is_kept: bool = False
    """...but for what was marked and is pinned."""

    @property
    def request_id(self) -> str:
        return f"req-{self.number}"

    @property
    def parts(self) -> tuple[Arrival, ...]:
        """The same request for each of its prompts alone."""
        if not self.further:
            return (self,)
        prompts = enumerate((self.prompt, *self.further))
        return tuple(attrs.evolve(self, prompt=prompt, further=(), part=part) for part, prompt in prompts)

    @property
    def num_outputs(self) -> int:
        """All choices of all prompts: those of the first come first."""
        return (1 + len(self.further)) * self.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, (self.prompt, *self.further)))

    @property
    def grammar_text(self) -> str:
        """How its grammar is written."""
        return f"{self.grammar}:{int(self.reasons)}:{','.join(map(str, self.script))}"

    @property
    def is_read(self) -> bool:
        """Whether reasoning and calls are told from text."""
        return bool(self.tools) or self.reasons or self.is_amid_reasoning

    @property
    def reads_cache(self) -> bool:
        return self.prompt_logprobs is None
