"""The tokenizer: from prompts to sequences with block keys.

Receives open requests, whose `Encode` it takes. For each it tells the accountant the lengths of the prompts
(`Prompted`), then submits one sequence per (prompt, choice) through the request desk; or it tells the accountant why
the request cannot be served (`Refused`). It answers `CountTokens`, `ReadPrompt` and `KeyPrompt` by itself.

A short request is served at once, in order of arrival. Any other is served in its own task, which waits for its turn in
a queue (`text_workers/`), outlives this actor, and is cancelled when its client leaves. Turns of a chat that the same
domain has sent before are not tokenized again (`segment_cache.py`).

All state is in the job store, which outlives the actor. After a death its successor goes on with the request in hand
after the last step that was taken; a request that kills it twice is refused. A task that raises counts as a death.

What must always hold: no request waits here for another client's longer request; once a request is encoded or given up,
nothing here holds its prompts, and the request desk has been told; no sequence is submitted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import attrs
import structlog
import trio

from ..channel import Poster, Receiver
from ..config.runtime_config import RuntimeConfig
from ..messages.accountant import Prompted, Refused
from ..messages.grammar import GrammarSpec, ignored_within
from ..messages.handler import Counted, Keyed, PromptAnswer
from ..messages.outcomes import RequestError
from ..messages.sampling import SamplingParams
from ..messages.tokenizer import CountTokens, PromptQuestion, ReadPrompt
from ..request_desk.desk import RequestDesk
from ..request_desk.open_requests import OpenRequest
from ..shared.block_keys import chain_image_keys
from ..shared.tokenizers_library import catching_panics
from .encoder import TextEncoder
from .encoding_errors import OVERLOADED, TOKENIZER_FAILED, QueueFull, client_error
from .job_store import MAX_DEATHS, Job, JobStore, TokenizerMessage
from .prompt_encoder import EncodedPrompt, EncodingOptions, EncodingSlot, GrammarChecks, PromptEncoder
from .prompt_scoring import reads_cache, too_many_scores
from .prompt_sizes import exceeds_context, num_bytes_to_encode
from .sampling_completion import SamplingCompleter
from .submission import Submission, root_key_of

log = structlog.get_logger()

HASHED_BLOCKS = 2048
"""Blocks whose keys are computed between two checkpoints."""


class TokenizerActor:
    def __init__(
        self,
        store: JobStore,
        config: RuntimeConfig,
        encoder: TextEncoder,
        desk: RequestDesk,
        accountant: Poster[Prompted | Refused],
        prompt_encoder: PromptEncoder,
        grammars: GrammarChecks,
        tasks: trio.Nursery,
        on_death: Callable[[Exception, str], object],
    ) -> None:
        """`encoder` encodes delimiters of reasoning and bounds the length of texts; `prompt_encoder` encodes prompts.

        Long requests are served in `tasks`; when one raises, `on_death(error, request_id)` is called, which may raise
        to end the server.
        """
        self._grammars = grammars
        self._store = store
        self._config = config
        self._lengths = encoder
        self._sampling = SamplingCompleter(config, encoder)
        self._desk = desk
        self._accountant = accountant
        self._encoder = prompt_encoder
        self._tasks = tasks
        self._on_death = on_death

    async def run(self, inbox: Receiver[TokenizerMessage]) -> None:
        """Serve requests until cancelled."""
        store, pending = self._store, self._store.pending
        while True:
            while pending:
                await self._handle(pending[0])
                store.take_off()
            pending.extend(await inbox.receive_all())

    async def _handle(self, first: TokenizerMessage | Job | None) -> None:
        store = self._store
        if first is not None and store.is_first_culprit:
            self._give_up(first)
        elif isinstance(first, PromptQuestion):
            self._tasks.start_soon(self._answer, first)
            store.pending[0] = None
        elif first is not None:
            if isinstance(first, OpenRequest):
                first = store.pending[0] = Job.of(first, self._grammars)
            await self._start(first)

    async def _start(self, job: Job) -> None:
        """Serve a short request. For any other, enter the queue now, before later requests, and start a task."""
        if job.has_ended or job.opened.stopped:
            self._end(job)
            return
        slot = job.slot or self._enter(job)
        if isinstance(slot, RequestError):
            self._refuse(job, slot)
        elif job.is_short:
            await self._serve(job, slot)
        else:
            self._tasks.start_soon(self._serve_until_left, job, slot)
            self._store.pending[0] = None

    def _enter(self, job: Job) -> EncodingSlot | RequestError:
        """Enter the queue for a worker, unless a prompt or the queue is too long."""
        param, limit = job.options.prompt_param, job.options.limit(self._max_model_len)
        for prompt in job.prompts:
            if (error := exceeds_context(prompt, param, self._lengths, limit)) is not None:
                return error
        if job.is_short:
            job.slot = self._encoder.inline_slot()
            return job.slot
        texts = (*job.request.bad_words, job.request.prediction)
        num_bytes = num_bytes_to_encode(job.prompts, texts, echo=job.options.echo)
        try:
            job.slot = self._encoder.enter(job.options.tenant, num_bytes)
        except QueueFull:
            return OVERLOADED
        return job.slot

    @property
    def _max_model_len(self) -> int:
        return self._desk.info.max_model_len

    # ------------------------------------------------------------ questions

    async def _answer(self, question: PromptQuestion) -> None:
        self._store.num_questions += 1
        name = f"question-{self._store.num_questions}"
        answer, num_deaths = None, 0
        with trio.CancelScope() as scope:
            question.outlet.when_left(scope.cancel)
            while answer is None and num_deaths < MAX_DEATHS:
                try:
                    with catching_panics():
                        answer = await self._look_at(question)
                except Exception as error:
                    if (answer := client_error(error, question.prompt_param)) is None:
                        num_deaths += 1
                        self._on_death(error, name)
        question.outlet.put(TOKENIZER_FAILED if answer is None else answer)

    async def _look_at(self, question: PromptQuestion) -> PromptAnswer:
        if isinstance(question, ReadPrompt):
            return await self._encoder.read(question)
        if isinstance(question, CountTokens):
            options = EncodingOptions(question.tenant, question.prompt_param)
            counted = await self._encoder.count(question.prompt, options, self._max_model_len)
            return counted if isinstance(counted, RequestError) else Counted(counted)
        request = question.request
        encoded = await self._encoder.encode_alone(request, self._max_model_len)
        if isinstance(encoded, RequestError):
            return encoded
        root = root_key_of(request, self._config)
        may_read = reads_cache(request, self._config.engine.pooling)
        return Keyed(encoded.token_ids, root, await self._keys(root, encoded), may_read, encoded.spans)

    # ------------------------------------------------------------ serving

    async def _serve_until_left(self, job: Job, slot: EncodingSlot) -> None:
        """Serve a request, once more if that raises; stop when its client leaves."""
        try:
            with trio.CancelScope() as scope:
                job.opened.when_stopped(scope.cancel)
                while not job.has_ended:
                    try:
                        await self._serve(job, slot)
                    except Exception as error:
                        job.num_deaths += 1
                        self._on_death(error, job.request_id)
                        if job.num_deaths >= MAX_DEATHS:
                            self._give_up(job)
        finally:
            self._end(job)

    async def _serve(self, job: Job, slot: EncodingSlot) -> None:
        """Encode and submit a request, from where it was left. May be called again after it has raised, for a bug."""
        refusal = None
        try:
            if not job.opened.stopped:
                with catching_panics():
                    refusal = await self._encode(job, slot)
                    if job.sampling is not None:
                        await self._submit(job, job.sampling)
        except Exception as error:
            refusal = client_error(error, job.options.prompt_param)
            if refusal is None:
                raise
        if refusal is not None:
            self._refuse(job, refusal)
        self._end(job)

    def _refuse(self, job: Job, error: RequestError) -> None:
        self._accountant.post(Refused(job.request_id, error))
        self._end(job)

    def _give_up(self, culprit: TokenizerMessage | Job) -> None:
        if isinstance(culprit, PromptQuestion):
            culprit.outlet.put(TOKENIZER_FAILED)
            return
        log.error("tokenizer.failed", request_id=culprit.request_id)
        self._accountant.post(Refused(culprit.request_id, TOKENIZER_FAILED))
        self._end(culprit) if isinstance(culprit, Job) else culprit.mark_encoded()

    def _end(self, job: Job) -> None:
        """Release what a request holds here. Later calls have no effect."""
        if job.slot is not None:
            job.slot.leave()
        job.prompts.clear()
        job.opened.mark_encoded()
        job.has_ended = True

    async def _encode(self, job: Job, slot: EncodingSlot) -> RequestError | None:
        """Encode the rest of a request and complete its sampling parameters, or return why it cannot be served."""
        request, config, max_model_len = job.request, self._config, self._max_model_len
        if job.sampling is not None:
            return None
        grammar = None if request.grammar is None else await self._check_grammar(request.grammar, job, slot)
        if isinstance(grammar, RequestError):
            return grammar
        while job.prompts:
            encoded = await self._encoder.encode(job.prompts[0], job.options, slot, max_model_len)
            refusal = encoded if isinstance(encoded, RequestError) else job.add(encoded, max_model_len)
            if refusal is not None:
                return refusal
            await slot.pause()
        lengths = [len(prompt.token_ids) for prompt in job.encoded]
        limits = config.max_prompt_scores, config.max_output_scores
        if refusal := too_many_scores(request, lengths, job.budgets, *limits):
            return refusal
        bad_words = await self._encoder.encode_bad_words(request.bad_words, slot) if request.bad_words else []
        prediction = await self._encoder.encode_prediction(request.prediction, slot, max_model_len)
        slot.leave()
        sampling = self._sampling.complete(request, bad_words, grammar, self._desk.info.output, max_model_len)
        if isinstance(sampling, RequestError):
            return sampling
        job.sampling = attrs.evolve(sampling, prediction=prediction) if prediction else sampling
        return None

    async def _check_grammar(self, spec: GrammarSpec, job: Job, slot: EncodingSlot) -> str | RequestError:
        if (result := self._grammars.known(spec, job.options)) is None:
            slot.rest()
            result = await self._grammars.check(spec, job.options)
        job.opened.dropped = () if isinstance(result, RequestError) else ignored_within(result)
        return result

    async def _submit(self, job: Job, sampling: SamplingParams) -> None:
        """Submit the sequences of a request that were not submitted yet, as there is room, until its client leaves."""
        request, config, sequences = job.request, self._config, self._desk.sequences
        if job.submission is None:
            root, num_hashed = root_key_of(request, config), 0
            for encoded in islice(job.encoded, len(job.block_keys), None):
                job.block_keys.append(await self._keys(root, encoded))
                num_hashed += len(job.block_keys[-1])
                if num_hashed >= HASHED_BLOCKS:
                    num_hashed = 0
                    await trio.lowlevel.checkpoint()
            special = self._lengths.special_token_ids
            apart = self._desk.pool.was_ever_several
            made = Submission(request, job.encoded, job.budgets, sampling, root, job.block_keys, config, special, apart)
            job.sequence_ids = sequences.new_sequence_ids(made.num_sequences)
            job.submission = made
        if job.opened.stopped:
            return
        outlet = job.opened.mailbox
        if not job.is_prompted:
            self._accountant.post(job.submission.prompted(job.sequence_ids))
            job.is_prompted = True
        for submit, track in islice(job.submission.messages(job.sequence_ids, outlet), job.num_submitted, None):
            await job.opened.until_room(submit, config.submit_window)
            if not await self._desk.submit(submit, track, job.opened):
                return
            job.num_submitted += 1

    async def _keys(self, root: bytes, prompt: EncodedPrompt) -> list[bytes]:
        """Return the keys of a prompt's blocks, computed a few milliseconds at a time; none without prefix caching."""
        if not self._config.engine.enable_prefix_caching:
            return []
        block_size = self._config.engine.block_size
        stride = HASHED_BLOCKS * block_size
        token_ids, images = prompt.token_ids, prompt.images
        keys = chain_image_keys(root, token_ids[:stride], block_size, images, 0)
        for start in range(stride, len(token_ids), stride):
            await trio.lowlevel.checkpoint()
            keys += chain_image_keys(keys[-1], token_ids[start : start + stride], block_size, images, start)
        return keys
