"""Every message of the house, grouped by who receives it.

Nothing here behaves: messages are frozen and are made, sent and read. The two bodies that cross the process border
once a step (`StepReport`) or once a sequence (`Submit`) are plain columns of ints, bytes and strings, so that
`channel.py` can put them on a socket; the rest travels inside one process. What is made once a step is a msgspec
Struct, which costs a third of an attrs class to make; everything else is an attrs class.

What must always hold:
- ids of sequences and requests are the server's own; nothing a client sends is ever a key;
- per-step messages are columns over the step's sequences (parallel lists), never lists of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Protocol

import attrs
import msgspec

from quipu.actors.counts import UNKNOWN, Count, shown

# ---------------------------------------------------------------- vocabulary


class Outcome(StrEnum):
    """How a request ended, exactly one of these."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Fault(StrEnum):
    """Why the server itself failed a request. Such a request counts no tokens in any report; its record has them."""

    ENGINE_DIED = "engine_died"
    STEP_FAILED = "step_failed"
    RECOVERED = "recovered"  # the server died, and a later one closed the record


class FinishReason(StrEnum):
    """Why a choice stopped, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class ErrorKind(StrEnum):
    """Whose fault an error is; the web layer chooses status and shape from it."""

    INVALID = "invalid"  # the request cannot be served as it stands (400)
    OVERLOADED = "overloaded"  # come back later (503 with Retry-After)
    TIMEOUT = "timeout"  # its deadline has passed (504)
    INTERNAL = "internal"  # ours (500)


@attrs.frozen
class RequestError:
    """What a client is told when its request fails. `param` names the field at fault, where one is."""

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None


@attrs.frozen
class LogitRules:
    """How one sequence's logits are changed before a token is drawn; `kernels/processors.py` has the definitions."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[int, float] = attrs.field(factory=dict)
    """By token id."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """As token ids, which the tokenizer puts in: a request has words."""
    min_tokens: int = 0
    held_back_token_ids: tuple[int, ...] = ()
    """Not drawn before there are `min_tokens` outputs. The tokenizer puts in whatever ends the sequence."""


@attrs.frozen
class SamplingParams:
    """How the tokens of one sequence are drawn. Checked by the web layer, never again below it."""

    max_tokens: int
    """Output tokens at most, at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    seed: int = 0
    """64 bits; with the output's position it keys Philox, so a draw depends on nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence when drawn; counted in the completion, not shown."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each drawn one and its logprob. None: nothing is told."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first."""
    rules: LogitRules | None = None
    """None, as nearly always: logits are drawn from as they are."""


# ---------------------------------------------------------------- to the tokenizer


@attrs.frozen
class TextPrompt:
    text: str


@attrs.frozen
class TokenPrompt:
    token_ids: tuple[int, ...]


class CacheTtl(StrEnum):
    """How long a client asks for a prefix to be kept after its last use."""

    FIVE_MINUTES = "5m"
    ONE_HOUR = "1h"


@attrs.frozen
class ToolMark:
    """A breakpoint at the end of a tool's definition."""

    ttl: CacheTtl
    tool: int


@attrs.frozen
class ContentMark:
    """A breakpoint in a message's content."""

    ttl: CacheTtl
    message: int
    num_chars: int
    """Of the content before it."""


@attrs.frozen
class CallMark:
    """A breakpoint at the end of one of a message's tool calls."""

    ttl: CacheTtl
    message: int
    call: int


Mark = ToolMark | ContentMark | CallMark


@attrs.frozen
class ChatPrompt:
    """Messages in the order given, rendered through the checkpoint's chat template.

    Messages and tools are as chat templates know them: `role`, `content`, `reasoning_content`, `tool_calls` with
    arguments as objects, `tool_call_id`, `name`.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    continue_final: bool = False
    """The last message is the beginning of the answer: the prompt ends with its last character."""
    marks: tuple[Mark, ...] = ()
    """Cache breakpoints, in the order of the prompt."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


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


@attrs.frozen
class Counted:
    num_tokens: int


class CountOutlet(Protocol):
    """Where the answer to a `CountTokens` goes. Neither method blocks or raises."""

    def put(self, answer: Counted | RequestError, /) -> None: ...

    def when_left(self, call: Callable[[], object], /) -> None:
        """Have `call` hear that nobody waits for the answer any more; at once, if that is so already."""
        ...


# ---------------------------------------------------------------- to the scheduler


@attrs.frozen
class Pin:
    """A prefix of a prompt that its client wants kept."""

    num_blocks: int
    """Full blocks of it, at least 1."""
    ttl_s: int
    """How long after its last use."""


@attrs.frozen
class Submit:
    """One sequence, ready to run. Exactly one `Terminal` column entry will answer it."""

    sequence_id: int
    prompt_token_ids: list[int]
    root_key: bytes
    """Where the chain of block keys starts: domain, model, KV layout."""
    block_keys: list[bytes]
    """Chain keys of the prompt's full blocks, in order."""
    sampling: SamplingParams
    tenant: str = ""
    """Who is served, for policies that are fair among them."""
    priority: int = 0
    """Lower is served first, where the policy looks at it."""
    reads_cache: bool = True
    """Whether cached blocks may serve it. False: every position is computed, and published as ever."""
    pins: tuple[Pin, ...] = ()
    """Prefixes to be kept once they are computed, shortest first."""
    party_id: int = 0
    """The first sequence of its request; 0 for one that is alone."""
    num_to_come: int = 0
    """Sequences of its request that follow: they are let in or refused together."""
    tokens_to_come: int = 0
    """Prompt tokens of those."""


@attrs.frozen
class Abort:
    """End a sequence: its client left, or a stop string was found, or a sibling failed. Ignored if it has ended."""

    sequence_id: int
    ends_party: bool = False
    """It is its request's first, and no other will be submitted."""


@attrs.frozen
class EngineReady:
    """First message of an engine's incarnation: what it serves with."""

    incarnation: int
    num_blocks: int
    block_size: int
    backend: str
    dtype: str
    max_model_len: int | None = None
    """None: as configured."""
    instruction_set: str | None = None
    determinism: str = "strict"
    """What runs: `strict` (a row's bits do not depend on its batch, chunks and cache) or `fast`."""
    num_threads: int | None = None
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int | None = None
    """What the largest pass took at its highest; None where it was not run."""


@attrs.frozen
class EngineRefused:
    """Only message of an engine that cannot serve as it is configured, now or later."""

    reason: str


@attrs.frozen
class Alive:
    """Said by an engine every second, also during a step: its loop runs."""

    step: int
    """The step that the executor runs; 0: none."""
    seconds: float
    """Since it began, by the engine's clock."""


@attrs.frozen
class ResetPrefixCache:
    """Nothing that has been published is found any more; what is held drains. Requests sent after it miss."""


# ---------------------------------------------------------------- scheduler <-> KV-block manager


class MissReason(StrEnum):
    """Why a prompt's cached prefix ends where it does."""

    NONE = "none"
    """It does not: every block that may be reused was."""
    DISABLED = "disabled"
    """Prefix caching is off."""
    TOO_SHORT = "shorter_than_a_block"
    """No full block without the last prompt token."""
    EVICTED = "evicted"
    """The next block was there and has been reused for something else."""
    OTHER_DOMAIN = "other_domain"
    """The same tokens are there, under another tenant or salt. For operators only: a client must not learn it."""
    DIVERGED = "diverged"
    """The longest chain that is there goes on differently, or not at all."""
    NEEDS_PROMPT_LOGPROBS = "needs_prompt_logprobs"
    """The request reads nothing: it wants to know of every prompt position (`echo`, `prompt_logprobs`)."""


@attrs.frozen
class CacheMiss:
    reason: MissReason
    token: int
    """Position of the first prompt token that was not found."""


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """An ordered proposal for one step; one synchronous function of `core` walks it, and `Granted` is what came of it.

    Applied in the order of the fields. An empty proposal (no rows, no candidates) carries commits and frees when there
    is no next step.
    """

    step: int
    """Number of the step proposed; keys published by this walk belong to it."""
    failed_steps: list[int]
    """Steps that raised or were dropped, newest first: their pending keys are unpublished."""
    committed_steps: list[int]
    """Steps that are done, oldest first: their pending keys become committed."""
    filled_sequence_ids: list[int]
    filled_block_indexes: list[int]
    filled_keys: list[bytes]
    filled_parent_keys: list[bytes]
    filled_token_ids: list[list[int]]
    """Blocks that decoding completed in committed steps; their keys were not known before."""
    free_sequence_ids: list[int]
    """Sequences to release: ended, failed, or withdrawn."""
    row_ids: list[int]
    """Running sequences that need something of the KV cache in this step, in the order they are served: those that
    prefill, and those whose next position opens a block. The others are in the step unless they are preempted."""
    row_starts: list[int]
    """First position each row computes in this step."""
    row_counts: list[int]
    """Positions each row computes in this step."""
    victim_ids: list[int]
    """Whom to preempt when blocks run out, first victim first; empty where they are known to be enough."""
    candidate_ids: list[int]
    """Waiting sequences, in the order they are admitted."""
    candidate_num_tokens: list[int]
    """Tokens each has to compute, cached ones included."""
    candidate_num_prompt_tokens: list[int]
    """How many of them are the prompt's: after a preemption there are outputs too."""
    candidate_keys: list[list[bytes]]
    """Chain keys of each one's full blocks."""
    candidate_root_keys: list[bytes]
    """What each chain starts from."""
    candidate_token_ids: list[list[int]]
    """Each one's tokens. Never changed by whoever sends or gets them."""
    token_budget: int
    """Positions left for candidates once every row is served."""
    candidate_chunk_limit: int = 1 << 30
    """Most positions that one candidate computes in this step."""
    reset_prefix_cache: bool = False
    """Before anything else: from here on nothing that was published can be found."""
    unread_ids: list[int] = []
    """Candidates that no cached block may serve."""
    candidate_pins: dict[int, tuple[Pin, ...]] = {}
    """Prefixes to be kept, by candidate, of those that want any."""


class Granted(msgspec.Struct, frozen=True, gc=False):
    """What the walk of one `Reserve` came to. Of the sequences it proposed, those not named got nothing."""

    step: int
    sequence_ids: list[int]
    """Rows first, then admitted candidates."""
    starts: list[int]
    counts: list[int]
    new_blocks: list[list[int]]
    """Physical blocks appended to each one's table; for a candidate its whole table so far."""
    admitted_ids: list[int]
    admitted_reused: list[int]
    """Prompt tokens in cached blocks, per admitted sequence: the *reused* entry of the books."""
    admitted_misses: list[CacheMiss]
    """Why each one's hit ends where it does."""
    admitted_lent: list[int]
    """A block with what each one's last block will hold, to be copied and not to be kept; 0, the null block, where
    there is none."""
    preempted_ids: list[int]
    written_ids: list[int]
    written_starts: list[int]
    written_ends: list[int]
    """Prompt positions in blocks that a sequence was the first to commit, by the commits of this walk."""
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks that nobody holds but whose contents can be hit."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Prompt tokens of each one's prefixes that the commits of this walk have pinned, or found pinned."""
    num_pinned_blocks: int = 0
    """Blocks that no sequence holds, but a pin does. They are not free."""
    num_pins_yielded: int = 0
    """Pins that this walk has let go because somebody needed blocks."""


# ---------------------------------------------------------------- scheduler <-> executor


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. A plan whose generation has failed is answered by `StepDropped` and not run."""

    step: int
    generation: int
    released_ids: list[int]
    """Sequences the executor may forget, applied even when the plan is dropped."""
    admitted_ids: list[int]
    admitted_sampling: list[SamplingParams]
    admitted_root_keys: list[bytes]
    admitted_keys: list[list[bytes]]
    """Chain keys of the blocks that were granted as cached, in order, to be checked against the executor's tags."""
    admitted_tokens: list[list[int]]
    """Token ids in those blocks; the executor continues the chain from them."""
    admitted_num_outputs: list[int]
    """Outputs drawn before this admission (after a preemption): the next draw's position."""
    row_ids: list[int]
    row_epochs: list[int]
    row_starts: list[int]
    row_counts: list[int]
    row_new_blocks: list[list[int]]
    row_token_ids: list[list[int]]
    """Ids to feed; empty where the row feeds the token that the step before it draws (still on the device)."""
    row_samples: list[bool]
    """Whether the row's last position draws a token."""
    admitted_lent: list[int] = []
    """Parallel to `admitted_ids`, as in `Granted`. Contents are those of the time before this pass."""
    to_score: ToScore | None = None
    masks: TokenMasks | None = None


class TokenMasks(msgspec.Struct, frozen=True, gc=False):
    """What a grammar allows in this step, by row: the executor applies it, nobody here makes it yet.

    Whoever does must know all of a row's tokens: such a row cannot be planned before the step before it is done.
    """

    rows: list[int]
    """Ascending; each draws a token in this step."""
    words: list[bytes]
    """Of each: ceil(vocabulary / 32) words of 32 bits, little-endian. A token whose bit (lowest first) is 0 is not
    drawn; one bit at least is 1, or the step fails."""


class ToScore(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a pass has to score, by row."""

    rows: list[int]
    positions: list[int]
    """Of the first token that each row scores: the position before it is among those the row computes."""
    token_ids: list[list[int]]
    """The prompt's tokens from there on, as far as this row scores them."""


class Scores(msgspec.Struct, array_like=True, frozen=True):
    """What the model gave some tokens, as parallel columns."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-softmax of the raw logits, before temperature and filters."""
    ranks: list[int]
    """1 is the likeliest."""
    top_ids: list[list[int]]
    """The likeliest tokens, best first, as many as were asked for."""
    top_logprobs: list[list[float]]


class PackedScores(msgspec.Struct, array_like=True, frozen=True):
    """`Scores` of prompt tokens as bytes (`core/scored.py`): thousands of them come at once.

    Arrays of unsigned ints of 4 bytes, and of floats of 8, as this machine has them.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    num_top: int
    """Likeliest tokens beside each."""
    top_ids: bytes
    top_logprobs: bytes


class StepScores(msgspec.Struct, array_like=True, frozen=True):
    """What one step found out for those who ask."""

    drawn_ids: list[int]
    """Sequences whose drawn tokens are scored, in the order of the tokens."""
    drawn: Scores
    prompt_ids: list[int]
    """Sequences whose prompt tokens are scored..."""
    prompt_positions: list[int]
    """...from this position on."""
    prompts: list[PackedScores]


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """What one pass did; every row is booked, whatever happened to its sequence meanwhile."""

    step: int
    generation: int
    row_ids: list[int]
    row_epochs: list[int]
    row_starts: list[int]
    row_ends: list[int]
    """Spans of positions whose KV was written: the *computed* entries of the books."""
    sampled_rows: list[int]
    """Indexes into the rows that drew a token."""
    sampled_token_ids: list[int]
    read_ids: list[int]
    """Sequences whose first step of an admission this was."""
    read_tokens: list[int]
    """Tokens in granted blocks that the executor's own tags confirm: the *read* entry of the books."""
    seconds: float
    scores: StepScores | None = None
    """None, as nearly always: nobody asks."""
    copied_tokens: list[int] = []
    """Parallel to `read_ids`: tokens behind those whose KV was copied from a lent block, once its tag was confirmed:
    the *copied* entry. Empty: none."""


@attrs.frozen
class StepFailed:
    step: int
    generation: int
    error: str


@attrs.frozen
class StepDropped:
    step: int
    generation: int


StepResult = StepDone | StepFailed | StepDropped

# ---------------------------------------------------------------- engine -> web: accountant, then detokenizer


class StepReport(msgspec.Struct, array_like=True, frozen=True):
    """One step as the web process hears of it: tokens for the detokenizer, entries for the accountant.

    Array-like, because one is sent every step. Columns of one group are parallel.
    """

    number: int
    """Counted up from 1 in the life of an engine: a report that is lost, or comes twice, shows."""
    step: int
    # what the block manager and the executor book at a sequence's admission
    admitted_ids: list[int]
    admitted_number: list[int]
    """1 at a sequence's first admission, counted up by preemption."""
    admitted_reused: list[int]
    admitted_read: list[int]
    admitted_miss_reasons: list[str]
    admitted_miss_tokens: list[int]
    # spans of positions whose KV this step wrote
    span_ids: list[int]
    span_starts: list[int]
    span_ends: list[int]
    # prompt positions in blocks that a sequence was the first to commit
    written_ids: list[int]
    written_starts: list[int]
    written_ends: list[int]
    # tokens for the client, in order
    token_sequence_ids: list[int]
    token_ids: list[int]
    # sequences that ended by themselves with the token above
    ended_ids: list[int]
    ended_reasons: list[str]
    # one a Submit, after the last step that held the sequence
    terminal_ids: list[int]
    terminal_errors: list[str | None]
    """None: it ended or was aborted; else why it failed."""
    terminal_error_kinds: list[str | None]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preempted: int
    # said by engines that have more to say than this one; empty: nothing special
    admitted_tiers: list[dict[str, int] | None] = []
    """Parallel to `admitted_ids`: reused tokens by tier. None: the engine does not count them. Empty: all `device`."""
    admitted_sides: list[str] = []
    """Parallel to `admitted_ids`: `prefill`, or `decode` where a sequence came with its KV from another engine, which
    is not a hit. Empty: all `prefill`."""
    revised_ids: list[int] = []
    revised_tiers: list[str] = []
    revised_tokens: list[int] = []
    """Granted tokens whose load from a lower tier failed: they are computed, not reused."""
    estimated_ids: list[int] = []
    estimated_tokens: list[int] = []
    """A router's guess at what a sequence's engine reuses, for an engine that says nothing."""
    pinned_ids: list[int] = []
    pinned_ends: list[int] = []
    """Prompt tokens in marked prefixes of each one that are pinned."""
    num_pinned_blocks: int = 0
    """Neither free nor held by a sequence."""
    num_pins_yielded: int = 0
    admitted_lent: list[int] = []
    """Parallel to `admitted_ids`: tokens behind the reused ones that the block manager has lent. Empty: none."""
    admitted_copied: list[int] = []
    """Likewise: those that the executor copied. Nobody's discount."""
    scores: list[StepScores] = []
    """Of each step reported here that has any, in order: every token above of a sequence that asks, and prompts."""


class Side(StrEnum):
    """Which half of a disaggregated pair an admission was on."""

    PREFILL = "prefill"
    DECODE = "decode"


# ---------------------------------------------------------------- to the accountant


@attrs.frozen
class Caller:
    """Who sent a request and what they call it: what a bill needs besides numbers. Checked by the web layer."""

    tenant: str = "default"
    key_id: str | None = None
    """Of the API key that it came with; None where none is needed."""
    model: str = ""
    """The name that was asked for."""
    client_request_id: str | None = None
    """An alias for logs and echo, never a key."""
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    """Digest of tenant, idempotency key and body: equal for a retry of the same work only."""


@attrs.frozen
class OpenAccount:
    request_id: str
    endpoint: str
    received_at: float
    """Clock of the process (`trio.current_time`)."""
    outlet: Outlet
    caller: Caller = Caller()
    seed: int | None = None
    """Of its draws, as its record will have it."""


@attrs.frozen
class Prompted:
    """A request's sequences, before the first of them is submitted."""

    request_id: str
    sequence_ids: tuple[int, ...]
    prompt_indexes: tuple[int, ...]
    choice_indexes: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...]
    breakpoints: tuple[tuple[Breakpoint, ...], ...] = ()
    """Those of each sequence's prompt, in order. Empty: nobody marked any."""


@attrs.frozen
class Breakpoint:
    """The end of a prefix that a client has marked as worth keeping."""

    position: int
    """Prompt tokens before it; 0 where the chat template has left no trace of it. For the accountant, those in whole
    blocks."""
    ttl: CacheTtl


@attrs.frozen
class Refused:
    """A request that cannot be served, or not any longer, and why."""

    request_id: str
    error: RequestError


@attrs.frozen
class Completed:
    """The web side's word on one sequence: how many tokens its client was given, and why it stopped."""

    request_id: str
    sequence_id: int
    num_completion_tokens: int
    finish_reason: FinishReason | None
    """None: it was told to forget the sequence before it had stopped."""


@attrs.frozen
class Left:
    """A request's scope has ended. No Submit of it can follow."""

    request_id: str
    submitted_ids: tuple[int, ...]
    """Those of its sequences that an engine was given: the account waits for their Terminals."""


@attrs.frozen
class EngineDied:
    incarnation: int
    reason: str
    held_ids: tuple[int, ...]
    """Sequences that it had been given and had not answered, as far as reports were read when it died."""


# ---------------------------------------------------------------- to the detokenizer


@attrs.frozen
class Track:
    """A sequence whose tokens will come; sent before its Submit."""

    request_id: str
    sequence_id: int
    index: int
    """The choice's index in the response."""
    prompt_tail: tuple[int, ...]
    """The prompt's last few ids: some tokenizers need them to place spaces."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    outlet: Outlet
    is_scored: bool = False
    """Scores come with its tokens."""
    scores_from: int | None = None
    """The sequence with which its prompt is scored: itself, or the first choice of the same prompt."""
    num_prompt_scores: int = 0
    """Tokens of the prompt that are scored there."""
    echo: PromptText | None = None
    """The prompt, where the choice's text begins with it."""
    prompt_only: bool = False
    """The engine's output is nobody's: it computed one only to have computed the prompt."""
    min_tokens: int = 0
    """No stop string ends among so many tokens."""


@attrs.frozen
class PromptText:
    """A prompt as its client reads it back."""

    text: str
    first_token_id: int
    offsets: tuple[int, ...]
    """Characters before each token."""


@attrs.frozen
class Tokens:
    """The detokenizer's part of a step report."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended_ids: list[int]
    ended_reasons: list[str]
    scores: list[StepScores] = attrs.field(factory=list)


@attrs.frozen
class Forget:
    """These sequences' clients are gone or served; drop what is held for them."""

    sequence_ids: tuple[int, ...]


# ---------------------------------------------------------------- to a request's outlet


@attrs.frozen
class Started:
    """A prompt's numbers are known and frozen (first choice's admission). May come once per prompt of a list."""

    prompt_tokens: int | None
    """Sums over the prompts admitted so far. None: nobody can say."""
    cached_tokens: int | None
    cache_write_tokens: int | None
    created_5m_tokens: int = 0
    """Of those written, the ones up to the last breakpoint that is pinned, by the ttl of the first breakpoint after
    each."""
    created_1h_tokens: int = 0


class Delta(msgspec.Struct, frozen=True, gc=False):
    """More text of one choice, one item a token or held-back run of tokens."""

    index: int
    text: str
    num_tokens: int
    """Completion tokens this item accounts for."""
    finish_reason: FinishReason | None
    stop_match: str | None = None
    """The stop string that ended it."""


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """A token that might have stood somewhere, and what the model gave it."""

    token_id: int
    text: str
    """Of this token alone: U+FFFD stands for bytes that make no character without others."""
    utf8: bytes
    """Its own bytes."""
    logprob: float
    rank: int


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token of a prompt or an output, and what the model gave it."""

    token_id: int
    text: str
    utf8: bytes
    offset: int
    """Characters of its choice's text before it."""
    logprob: float | None
    """None for a prompt's first token, which follows nothing; `rank` likewise."""
    rank: int | None
    top: tuple[LikelyToken, ...]
    """The likeliest in its place, best first; it is among them or not."""


class TokenScores(Protocol):
    """Scored tokens that become objects when they are written out, a few at a time."""

    def __len__(self) -> int: ...

    def offset(self, at: int, /) -> int:
        """Characters of its choice's text before one token."""
        ...

    def tokens(self, start: int, end: int, num_top: int, /) -> Iterator[ScoredToken]:
        """Those from `start` to `end`, each with `num_top` of its likeliest at most."""
        ...


class ScoredDelta(Delta, frozen=True, gc=False):
    """A delta of a choice whose client asked for logprobs, or for its prompt."""

    scores: tuple[ScoredToken, ...] = ()
    """Of the tokens that `num_tokens` counts, also where their text is held back."""
    prompt_scores: TokenScores | None = None
    """Of the whole prompt, once, before anything else, with its text where that is echoed; without its first token,
    unless it is. All choices of a prompt have the same."""


@attrs.frozen(kw_only=True)
class UsageRecord:
    """The one record of a request's usage; every API's numbers are projections of it. No prompt, no text.

    Times are Unix seconds.
    """

    request_id: str
    client_request_id: str | None = None
    idempotency_key: str | None = None
    idempotency_digest: str | None = None
    retry_of: str | None = None
    """The first request with the same idempotency key and body. Both count in reports."""
    tenant: str = "default"
    key_id: str | None = None
    model: str = ""
    endpoint: str = ""
    received_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    closed_at: float = 0.0
    outcome: Outcome
    finish_reason: FinishReason | None = None
    """Of the first choice."""
    num_choices: int = 0
    """Sequences: prompts of a list times choices of each."""
    prompt: Count = UNKNOWN
    """Tokens of the admitted prompts; unknown: never tokenised, or never admitted."""
    cached: Count = UNKNOWN
    """Prompt tokens served from cache. Unknown (no admission) is not 0."""
    cached_by_tier: Mapping[str, int] | None = None
    cache_write: Count = UNKNOWN
    created_5m_tokens: int = 0
    """Of those written, the ones up to the last `cache_control` breakpoint that is pinned, by the ttl of the first
    breakpoint after each; 0 where the client marked nothing."""
    created_1h_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    computed_tokens: int = 0
    """Prompt positions first covered by a pass of this request."""
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    disputed: bool = False
    cache_misses: tuple[CacheMiss, ...] = ()
    """Why the cached prefix of each admitted prompt ended where it did."""
    incarnation: int | None = None
    """Of the engine that admitted it first."""
    seed: int | None = None
    """What its draws were keyed with, its own or one that it was given: 64 bits, signed as in OpenAI's API. None: an
    older server did not say."""
    fault: Fault | None = None
    """None: the server did not fail it, or an older server did not say."""

    @property
    def prompt_tokens(self) -> int | None:
        """As a client is told; None where nobody can say."""
        return shown(self.prompt)

    @property
    def cached_tokens(self) -> int | None:
        """As a client is told: a count, or a router's estimate where the engine reported nothing."""
        return shown(self.cached)

    @property
    def cache_write_tokens(self) -> int | None:
        return shown(self.cache_write)


@attrs.frozen
class Closed:
    """The last item of every request that its scope has not left."""

    record: UsageRecord
    error: RequestError | None
    is_final: bool = True
    """False: the client's deadline has passed, and the account stays open until the engine has ended the request. Then
    another one follows, for whoever wants to know its record; the client has had its answer."""


OutletEvent = Started | Delta | Closed


class Outlet(Protocol):
    """Where a request's events go: a mailbox, or something that writes at once. `put` never blocks and never raises."""

    def put(self, event: OutletEvent, /) -> None: ...
