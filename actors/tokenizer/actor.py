"""The tokenizer: from prompts to sequences with block keys.

Receives `Encode` from request handlers. For each request it tells the accountant the lengths of the prompts
(`Prompted`), then submits one sequence per (prompt, choice) through the request desk; or it tells the accountant why
the request cannot be served (`Refused`). It answers `CountTokens` by itself.

A short request is served at once, in order of arrival. Any other is served in a task of its own, which waits for its
turn in a queue (`text_workers/`) and is cancelled when its client leaves. A prompt that makes the tokenizer raise fails
its own request only. Turns of a chat that the same domain has sent before are not tokenized again (`segment_cache.py`).

What must always hold: no request waits here for another client's longer request; once a request is encoded or given up,
nothing here holds its prompts, and the request desk has been told.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import attrs
import structlog
import trio

from ..channel import Poster, Receiver
from ..config import RuntimeConfig
from ..messages.accountant import Prompted, Refused
from ..messages.grammar import GrammarSpec
from ..messages.handler import Counted
from ..messages.outcomes import RequestError
from ..messages.prompts import Prompt
from ..messages.sampling import SamplingParams
from ..messages.tokenizer import CountTokens, Encode
from ..request_desk.desk import RequestDesk
from ..shared.block_keys import chain_keys
from ..shared.tokenizers_library import catching_panics
from .context_length import output_budget
from .encoder import TextEncoder
from .encoding_errors import OVERLOADED, TOKENIZER_FAILED, QueueFull, client_error
from .grammar_check import GrammarChecks, place_grammar
from .prompt_encoder import EncodedPrompt, EncodingOptions, EncodingSlot, PromptEncoder, options_of
from .prompt_scoring import too_many_scores
from .prompt_sizes import exceeds_context, is_short, num_bytes_to_encode
from .sampling_rules import complete_rules, contradiction
from .submission import Submission, root_key_of
from .thinking_budget import ReasoningDelimiters, encode_delimiters, limit_reasoning

log = structlog.get_logger()

HASHED_BLOCKS = 2048
"""Blocks whose keys are computed between two checkpoints."""

TokenizerMessage = Encode | CountTokens


@attrs.define(eq=False)
class Job:
    """A request that is being encoded. Its prompts are held apart, so that each can be released as it is encoded."""

    request: Encode
    """Without its prompts, unless it is short."""
    prompts: deque[Prompt]
    options: EncodingOptions


class TokenizerActor:
    def __init__(
        self,
        config: RuntimeConfig,
        encoder: TextEncoder,
        desk: RequestDesk,
        accountant: Poster[Prompted | Refused],
        prompt_encoder: PromptEncoder,
        grammars: GrammarChecks,
    ) -> None:
        """`encoder` encodes the delimiters of reasoning; it recognizes texts that are too long by their length.

        `prompt_encoder` encodes what clients send.
        """
        self._grammars = grammars
        self._config = config
        self._lengths = encoder
        self._delimiters = cache(lambda tags: encode_delimiters(tags, encoder, config.vocab_size))
        self._desk = desk
        self._accountant = accountant
        self._encoder = prompt_encoder

    async def run(self, inbox: Receiver[TokenizerMessage]) -> None:
        """Serve requests until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                messages = deque(await inbox.receive_all())
                while messages:
                    message = messages.popleft()
                    if isinstance(message, CountTokens):
                        nursery.start_soon(self._count, [message])
                    else:
                        await self._handle(message, nursery)
                    del message  # otherwise it would stay alive until the next one arrives

    @property
    def _max_model_len(self) -> int:
        return self._desk.info.max_model_len

    # ------------------------------------------------------------ counting

    async def _count(self, held: list[CountTokens]) -> None:
        """Count one prompt's tokens. `held` contains the request and is emptied: nothing else holds its prompt."""
        request = held.pop()
        outlet, param = request.outlet, request.prompt_param
        answer: Counted | RequestError = TOKENIZER_FAILED
        with trio.CancelScope() as scope:
            outlet.when_left(scope.cancel)
            try:
                options, prompt = EncodingOptions(request.tenant, param), request.prompt
                del request
                with catching_panics():
                    counted = await self._encoder.count(prompt, options, self._max_model_len)
                answer = counted if isinstance(counted, RequestError) else Counted(counted)
            except Exception as error:
                answer = _error_for_client(error, param, None)
        outlet.put(answer)

    # ------------------------------------------------------------ serving

    async def _handle(self, request: Encode, nursery: trio.Nursery) -> None:
        """Serve a short request. For any other, enter the queue now, before later requests, and start a task."""
        grammar = request.grammar
        whole_request_is_short = is_short(request) and (grammar is None or self._grammars.known(grammar) is not None)
        kept = request if whole_request_is_short else attrs.evolve(request, prompts=())
        job = Job(kept, deque(request.prompts), options_of(request))
        del request
        if not self._desk.may_submit(job.request.request_id):
            self._desk.encoded(job.request.request_id)
            return
        slot = self._enter(job, whole_request_is_short)
        if isinstance(slot, RequestError):
            self._refuse(job, slot)
            self._desk.encoded(job.request.request_id)
        elif whole_request_is_short:
            await self._serve(job, slot)
        else:
            nursery.start_soon(self._serve_until_left, job, slot)

    def _enter(self, job: Job, is_inline: bool) -> EncodingSlot | RequestError:
        """Enter the queue for a worker, unless a prompt's length or the queue's shows that there is no point."""
        param, max_model_len = job.options.prompt_param, self._max_model_len
        for prompt in job.prompts:
            if (error := exceeds_context(prompt, param, self._lengths, max_model_len)) is not None:
                return error
        if is_inline:
            return self._encoder.inline_slot()
        num_bytes = num_bytes_to_encode(job.prompts, job.request.bad_words, echo=job.options.echo)
        try:
            return self._encoder.enter(job.options.tenant, num_bytes)
        except QueueFull:
            return OVERLOADED

    async def _serve_until_left(self, job: Job, slot: EncodingSlot) -> None:
        """Serve a request; stop when its client leaves."""
        with trio.CancelScope() as scope:
            self._desk.when_stopped(job.request.request_id, scope.cancel)
            await self._serve(job, slot)

    async def _serve(self, job: Job, slot: EncodingSlot) -> None:
        """Encode a request in `slot` and submit it."""
        request_id = job.request.request_id
        try:
            if self._desk.may_submit(request_id):
                with catching_panics():
                    await self._encode_and_submit(job, slot)
        except Exception as error:
            self._refuse(job, _error_for_client(error, job.request.prompt_param, request_id))
        finally:
            slot.leave()
            job.prompts.clear()
            self._desk.encoded(request_id)

    async def _encode_and_submit(self, job: Job, slot: EncodingSlot) -> None:
        request, max_model_len = job.request, self._max_model_len
        grammar = None if request.grammar is None else await self._check_grammar(request.grammar, job, slot)
        if isinstance(grammar, RequestError):
            self._refuse(job, grammar)
            return
        prompts: list[EncodedPrompt] = []
        budgets: list[int] = []
        while job.prompts:
            encoded = await self._encoder.encode(job.prompts.popleft(), job.options, slot, max_model_len)
            if isinstance(encoded, RequestError):
                self._refuse(job, encoded)
                return
            budget = output_budget(request, len(encoded.token_ids), max_model_len)
            if isinstance(budget, RequestError):
                self._refuse(job, budget)
                return
            prompts.append(encoded)
            budgets.append(budget)
            await slot.pause()
        lengths, config = [len(prompt.token_ids) for prompt in prompts], self._config
        if refusal := too_many_scores(request, lengths, budgets, config.max_prompt_scores, config.max_output_scores):
            self._refuse(job, refusal)
            return
        sampling = await self._complete_sampling(request, slot)
        slot.leave()
        if (conflict := contradiction(sampling.rules)) is not None:
            self._refuse(job, conflict)
            return
        if grammar is not None:
            sampling = attrs.evolve(sampling, grammar=place_grammar(grammar, self._delimiters_of(request)))
        await self._submit(request, prompts, budgets, sampling)

    async def _check_grammar(self, spec: GrammarSpec, job: Job, slot: EncodingSlot) -> str | RequestError:
        result = self._grammars.known(spec)
        if result is None:
            slot.rest()
            result = await self._grammars.check(spec, job.options.tenant)
        return result

    def _delimiters_of(self, request: Encode) -> ReasoningDelimiters | None:
        """Return what opens and closes reasoning in a request's output. None: all of the output is its answer."""
        tags = self._desk.info.output.reasoning_tags
        return None if request.output is None or tags is None else self._delimiters(tags)

    async def _complete_sampling(self, request: Encode, slot: EncodingSlot) -> SamplingParams:
        """Return the request's sampling parameters, with all that its rules name as ids."""
        words = await self._encoder.encode_bad_words(request.bad_words, slot) if request.bad_words else []
        config = self._config
        sampling = complete_rules(request.sampling, words, config.engine.eos_token_ids, config.vocab_size)
        budget, tags = request.thinking_budget, self._desk.info.output.reasoning_tags
        if budget is None or tags is None:
            return sampling
        return limit_reasoning(sampling, budget, self._delimiters(tags), self._max_model_len)

    async def _submit(
        self, request: Encode, prompts: list[EncodedPrompt], budgets: list[int], sampling: SamplingParams
    ) -> None:
        root = root_key_of(request, self._config)
        block_keys: list[list[bytes]] = []
        num_hashed = 0
        for encoded in prompts:
            block_keys.append(await self._keys(root, encoded) if self._config.engine.enable_prefix_caching else [])
            num_hashed += len(block_keys[-1])
            if num_hashed >= HASHED_BLOCKS:
                num_hashed = 0
                await trio.lowlevel.checkpoint()
        special_token_ids = self._lengths.special_token_ids
        submission = Submission(request, prompts, budgets, sampling, root, block_keys, self._config, special_token_ids)
        sequence_ids = self._desk.lane.new_sequence_ids(submission.num_sequences)
        if not self._desk.may_submit(request.request_id):
            return
        outlet = self._desk.outlet(request.request_id)
        self._accountant.post(submission.prompted(sequence_ids))
        for submit, track in submission.messages(sequence_ids, outlet):
            if not await self._desk.submit(submit, track):
                return

    async def _keys(self, root: bytes, prompt: EncodedPrompt) -> list[bytes]:
        """Return the keys of a prompt's blocks, computed a few milliseconds at a time."""
        block_size = self._config.engine.block_size
        stride = HASHED_BLOCKS * block_size
        keys = chain_keys(root, prompt.token_ids[:stride], block_size)
        for start in range(stride, len(prompt.token_ids), stride):
            await trio.lowlevel.checkpoint()
            keys += chain_keys(keys[-1], prompt.token_ids[start : start + stride], block_size)
        return keys

    def _refuse(self, job: Job, error: RequestError) -> None:
        self._accountant.post(Refused(job.request.request_id, error))


def _error_for_client(error: Exception, prompt_param: str, request_id: str | None) -> RequestError:
    expected = client_error(error, prompt_param)
    if expected is not None:
        return expected
    log.error("tokenizer.failed", request_id=request_id, error=type(error).__name__)
    return TOKENIZER_FAILED
