"""The job store: the tokenizer's requests and how far it got with each, kept where its death cannot lose them.

Owned by `wiring`, written by the tokenizer. After a death, its successor goes on with the message that was being
handled. A request that is served in a task of its own leaves `pending` for that task.

    inbox ─▶ pending ─▶ entered ─▶ prompts encoded, one by one ─▶ submission made ─▶ prompted ─▶ submitted, one by one

What must always hold: a step is taken and noted without anything between that may raise; a prompt is released as soon
as its encoding is kept; a message leaves `pending` only once it was handled or a task has it.
"""

from __future__ import annotations

from collections import deque

import attrs

from ..messages.outcomes import RequestError
from ..messages.prompts import Prompt
from ..messages.sampling import SamplingParams
from ..messages.tokenizer import Encode, PromptQuestion
from ..request_desk.open_requests import OpenRequest
from .context_length import output_budget, param_of, too_many_submitted
from .prompt_encoder import EncodedPrompt, EncodingOptions, EncodingSlot, GrammarChecks, options_of
from .prompt_sizes import is_short
from .submission import Submission

TokenizerMessage = OpenRequest | PromptQuestion

MAX_DEATHS = 2
"""A request with which the tokenizer dies this often is refused."""


@attrs.define(eq=False)
class Job:
    """A request that is being served. Its prompts are held apart, so that each can be released."""

    opened: OpenRequest
    request: Encode
    """Without its prompts, unless it is short."""
    prompts: deque[Prompt]
    """Those that are not encoded yet."""
    options: EncodingOptions
    is_short: bool
    """It is served at once, in order of arrival."""
    slot: EncodingSlot | None = None
    """Its place in the queue for a worker, once it has entered one."""
    encoded: list[EncodedPrompt] = attrs.field(factory=list)
    budgets: list[int] = attrs.field(factory=list)
    """Output tokens that each encoded prompt may have."""
    num_tokens: int = 0
    """Of all encoded prompts."""
    sampling: SamplingParams | None = None
    """Set once everything is encoded."""
    block_keys: list[list[bytes]] = attrs.field(factory=list)
    """Of each encoded prompt, as far as they were computed. Empty lists without prefix caching."""
    submission: Submission | None = None
    sequence_ids: tuple[int, ...] = ()
    is_prompted: bool = False
    """The accountant knows its sequences."""
    num_submitted: int = 0
    num_deaths: int = 0
    has_ended: bool = False

    @classmethod
    def of(cls, opened: OpenRequest, grammars: GrammarChecks) -> Job:
        """Take a request's prompts from it. It is short if its grammar, too, needs no work."""
        request = opened.message
        assert isinstance(request, Encode)
        options = options_of(request)
        knows_grammar = not request.grammar or grammars.known(request.grammar, options) is not None
        short = is_short(request) and knows_grammar
        opened.message = None
        kept = request if short else attrs.evolve(request, prompts=())
        return cls(opened, kept, deque(request.prompts), options, short)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def add(self, encoded: EncodedPrompt, max_model_len: int) -> RequestError | None:
        """Keep the encoding of the first prompt and release that prompt, or return why it cannot be served."""
        param = param_of(self.prompts[0], self.request.prompt_param)
        budget = output_budget(self.request, len(encoded.token_ids), max_model_len, param)
        if isinstance(budget, RequestError):
            return budget
        self.num_tokens += len(encoded.token_ids)
        if refusal := too_many_submitted(self.request, self.num_tokens):
            return refusal
        self.encoded.append(encoded)
        self.budgets.append(budget)
        self.prompts.popleft()
        return None


@attrs.define(eq=False)
class JobStore:
    pending: deque[TokenizerMessage | Job | None] = attrs.field(factory=deque)
    """Messages; a request that was begun is a `Job`. None: it was handled, or a task has it."""
    num_deaths: int = 0
    """Deaths with the first pending message in hand."""
    num_handled: int = 0
    """Messages that were not refused for killing the tokenizer."""
    num_questions: int = 0
    """Questions about prompts, which deaths name by number: they have no request id."""

    @property
    def is_first_culprit(self) -> bool:
        """Whether the first pending message has killed the tokenizer too often."""
        return self.num_deaths >= MAX_DEATHS

    def take_off(self) -> None:
        self.num_handled += not self.is_first_culprit
        self.pending.popleft()
        self.num_deaths = 0

    def record_death(self) -> str | None:
        """Record that the tokenizer has died, and return the id of the request that it was handling, if any."""
        first = self.pending[0] if self.pending else None
        if first is None:
            return None
        self.num_deaths += 1
        return None if isinstance(first, PromptQuestion) else first.request_id
