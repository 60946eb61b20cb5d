"""The tokenizer: from prompts to sequences with block keys.

Hears `Encode` from handlers; submits one sequence per (prompt, choice) through the desk's lane; tells the
accountant the prompts' lengths before that (`Prompted`), or why the request cannot be served (`Refused`). Answers
`CountTokens` by itself. A short request is served on the spot, in the order of its coming; any other in a task of its
own, which waits for its turn (`text_workers/lanes.py`, `text_workers/chat_pool.py`) and ends when its client leaves. A
prompt that makes the tokenizer raise fails its own request only. Of a chat, the turns that the same domain has sent
before are not tokenised again (`segment_cache.py`).

What must always hold: nobody waits here for a longer request of somebody else; once a request is encoded, or given up,
nothing here holds its prompts, and the desk has been told so.
"""

from __future__ import annotations

from collections import deque

import attrs
import structlog
import trio

from ..channel import Poster, Receiver
from ..config import RuntimeConfig
from ..messages.accountant import Prompted, Refused
from ..messages.detokenizer import Track
from ..messages.handler import Counted
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import Prompt
from ..messages.sampling import SamplingParams
from ..messages.scheduler import Submit
from ..messages.tokenizer import CountTokens, Encode
from ..request_desk.desk import RequestDesk
from ..shared.block_keys import chain_keys, root_key
from ..shared.breakpoints import in_whole_blocks, pins_of
from ..shared.seeds import complete_rules, contradiction, sequence_seed
from ..shared.tokenizers_library import catching_panics
from ..text_workers.encode_processes import EncodeProcesses
from ..text_workers.fair_queue import Crowded
from ..text_workers.lanes import Lanes, Place
from ..text_workers.pooled_encoder import BUSY, Asked, EncodedPrompt, PromptEncoder, failure_of
from ..text_workers.renderer import Renderer
from .context_length import output_room
from .prompt_scoring import prompt_scoring, too_many_scores
from .segment_cache import SegmentCache
from .vocabulary import Vocabulary

log = structlog.get_logger()

PROMPT_TAIL = 8
"""Prompt ids that a decoder may want to see before the first output."""
HASHED_BLOCKS = 2048
"""Blocks whose keys are made in one go."""

TokenizerMessage = Encode | CountTokens


@attrs.define(eq=False)
class Job:
    """A request that is being encoded, its prompts apart, so that each can be let go of."""

    request: Encode
    """Without its prompts, unless they are short."""
    prompts: deque[Prompt]
    asked: Asked


class TokenizerActor:
    def __init__(
        self,
        config: RuntimeConfig,
        vocabulary: Vocabulary,
        desk: RequestDesk,
        accountant: Poster[Prompted | Refused],
        renderer: Renderer,
        processes: EncodeProcesses | None = None,
    ) -> None:
        """`processes` encode long texts; without them threads do."""
        self._config = config
        self._desk = desk
        self._accountant = accountant
        self._lanes = Lanes(config.max_encode_waiting, config.max_encode_waiting_bytes, vocabulary.encoder, processes)
        self._encoder = PromptEncoder(vocabulary, renderer, self._lanes, SegmentCache(config.token_cache_bytes))

    async def run(self, inbox: Receiver[TokenizerMessage]) -> None:
        """Encode until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._lanes.run)
            while True:
                messages = deque(await inbox.receive_all())
                while messages:
                    message = messages.popleft()
                    if isinstance(message, CountTokens):
                        nursery.start_soon(self._count, [message])
                    else:
                        await self._take(message, nursery)
                    del message  # it would be kept until the next one comes

    # ------------------------------------------------------------ counting

    async def _count(self, handed: list[CountTokens]) -> None:
        """`handed`: the one request, to be taken out: nobody else holds its prompt."""
        request = handed.pop()
        outlet, param = request.outlet, request.prompt_param
        answer: Counted | RequestError = RequestError(ErrorKind.INTERNAL, "the prompt could not be tokenised")
        with trio.CancelScope() as scope:
            outlet.when_left(scope.cancel)
            try:
                asked, prompt = Asked(request.tenant, param), request.prompt
                del request
                with catching_panics():
                    counted = await self._encoder.count(prompt, asked, self._longest)
                answer = counted if isinstance(counted, RequestError) else Counted(counted)
            except Exception as error:
                answer = _explain(error, param, None)
        outlet.put(answer)

    # ------------------------------------------------------------ serving

    @property
    def _longest(self) -> int:
        return self._desk.info.max_model_len

    async def _take(self, request: Encode, nursery: trio.Nursery) -> None:
        """Serve a short request; have any other served, which takes its place in the queue now, before later ones."""
        is_short = self._encoder.is_short(request)
        job = _job_of(request, request if is_short else attrs.evolve(request, prompts=()))
        del request
        if not self._desk.may_submit(job.request.request_id):
            self._desk.encoded(job.request.request_id)
            return
        place = self._place_of(job, is_short)
        if isinstance(place, RequestError):
            self._refuse(job, place)
            self._desk.encoded(job.request.request_id)
        elif is_short:
            await self._serve(job, place)
        else:
            nursery.start_soon(self._serve_apart, job, place)

    def _place_of(self, job: Job, is_short: bool) -> Place | RequestError:
        """Where a request is encoded, or why it is refused at once."""
        if (error := self._misfit(job)) is not None:
            return error
        if is_short:
            return self._encoder.inline(is_short=True)
        try:
            return self._encoder.place_of(job.asked, job.prompts, job.request.bad_words)
        except Crowded:
            return BUSY

    def _misfit(self, job: Job) -> RequestError | None:
        """Why one of its prompts cannot fit the context, where that is told by its length: before any is encoded."""
        told = (self._encoder.misfit(prompt, job.asked, self._longest) for prompt in job.prompts)
        return next((error for error in told if error is not None), None)

    async def _serve_apart(self, job: Job, place: Place) -> None:
        """Serve a request until its client leaves."""
        with trio.CancelScope() as scope:
            self._desk.when_stopped(job.request.request_id, scope.cancel)
            await self._serve(job, place)

    async def _serve(self, job: Job, place: Place) -> None:
        """Encode a request in `place` and submit it."""
        request_id = job.request.request_id
        try:
            if self._desk.may_submit(request_id):
                with catching_panics():
                    await self._encode_and_submit(job, place)
        except Exception as error:
            self._refuse(job, _explain(error, job.request.prompt_param, request_id))
        finally:
            place.leave()
            job.prompts.clear()
            self._desk.encoded(request_id)

    async def _encode_and_submit(self, job: Job, place: Place) -> None:
        request, longest = job.request, self._longest
        prompts: list[EncodedPrompt] = []
        budgets: list[int] = []
        while job.prompts:
            encoded = await self._encoder.encode(job.prompts.popleft(), job.asked, place, longest)
            if isinstance(encoded, RequestError):
                self._refuse(job, encoded)
                return
            budget = output_room(request, len(encoded.token_ids), longest)
            if isinstance(budget, RequestError):
                self._refuse(job, budget)
                return
            prompts.append(encoded)
            budgets.append(budget)
            await place.pause()
        lengths, config = [len(prompt.token_ids) for prompt in prompts], self._config
        if refusal := too_many_scores(request, lengths, budgets, config.max_prompt_scores, config.max_output_scores):
            self._refuse(job, refusal)
            return
        sampling = await self._complete_sampling(request, place)
        place.leave()
        if (conflict := contradiction(sampling.rules)) is not None:
            self._refuse(job, conflict)
            return
        await self._submit(request, prompts, budgets, sampling)

    async def _complete_sampling(self, request: Encode, place: Place) -> SamplingParams:
        """What no output may hold, and what would end it too early, as tokens."""
        words = await self._encoder.encode_bad_words(request.bad_words, place) if request.bad_words else []
        engine = self._config.engine
        return complete_rules(request.sampling, words, engine.eos_token_ids, self._config.vocab_size)

    async def _submit(
        self, request: Encode, prompts: list[EncodedPrompt], budgets: list[int], sampling: SamplingParams
    ) -> None:
        engine = self._config.engine
        root = root_key(
            domain=request.domain,
            salt=request.cache_salt,
            model=self._config.model_names[0],
            kv_dtype=self._config.kv_dtype,
            kv_layout="head_major",
            block_size=engine.block_size,
        )
        places = [(prompt, choice) for prompt in range(len(prompts)) for choice in range(request.num_choices)]
        keys_of: list[list[bytes]] = []
        num_hashed = 0
        for encoded in prompts:
            keys_of.append(await self._keys(root, encoded) if engine.enable_prefix_caching else [])
            num_hashed += len(keys_of[-1])
            if num_hashed >= HASHED_BLOCKS:
                num_hashed = 0
                await trio.lowlevel.checkpoint()
        sequence_ids = self._desk.lane.new_sequence_ids(len(places))
        if not self._desk.may_submit(request.request_id):
            return
        outlet = self._desk.outlet(request.request_id)
        self._accountant.post(
            Prompted(
                request_id=request.request_id,
                sequence_ids=sequence_ids,
                prompt_indexes=tuple(prompt for prompt, _ in places),
                choice_indexes=tuple(choice for _, choice in places),
                num_prompt_tokens=tuple(len(prompts[prompt].token_ids) for prompt, _ in places),
                breakpoints=tuple(
                    in_whole_blocks(prompts[prompt].breakpoints, engine.block_size) for prompt, _ in places
                ),
            )
        )
        tokens_to_come = sum(len(prompts[prompt].token_ids) for prompt, _ in places)
        for index, (sequence_id, (prompt, choice)) in enumerate(zip(sequence_ids, places, strict=True)):
            token_ids = prompts[prompt].token_ids
            seed = sequence_seed(sampling.seed, prompt, choice)
            tokens_to_come -= len(token_ids)
            scoring = prompt_scoring(request, sampling, sequence_id, choice, len(token_ids))
            submit = Submit(
                sequence_id=sequence_id,
                prompt_token_ids=token_ids,
                root_key=root,
                block_keys=keys_of[prompt],
                tenant=request.domain,
                priority=request.priority,
                sampling=attrs.evolve(
                    sampling,
                    max_tokens=max(1, budgets[prompt]),
                    seed=seed,
                    prompt_logprobs=scoring.prompt_logprobs,
                ),
                reads_cache=scoring.reads_cache,
                pins=pins_of(prompts[prompt].breakpoints, engine.block_size) if engine.enable_prefix_caching else (),
                group_id=sequence_ids[0],
                num_to_come=len(places) - index - 1,
                tokens_to_come=tokens_to_come,
            )
            track = Track(
                request_id=request.request_id,
                sequence_id=sequence_id,
                index=index,
                prompt_tail=tuple(token_ids[-PROMPT_TAIL:]),
                stop=request.stop,
                include_stop=request.include_stop,
                skip_special_tokens=request.skip_special_tokens,
                outlet=outlet,
                is_scored=sampling.logprobs is not None,
                scores_from=scoring.scores_from,
                num_prompt_scores=scoring.num_prompt_scores,
                echo=prompts[prompt].echo,
                prompt_only=budgets[prompt] == 0,
                min_tokens=0 if sampling.rules is None else sampling.rules.min_tokens,
            )
            if not await self._desk.submit(submit, track):
                return

    async def _keys(self, root: bytes, prompt: EncodedPrompt) -> list[bytes]:
        """Keys of a prompt's blocks, some milliseconds' worth at a time."""
        block_size = self._config.engine.block_size
        stride = HASHED_BLOCKS * block_size
        keys = chain_keys(root, prompt.token_ids[:stride], block_size)
        for start in range(stride, len(prompt.token_ids), stride):
            await trio.lowlevel.checkpoint()
            keys += chain_keys(keys[-1], prompt.token_ids[start : start + stride], block_size)
        return keys

    def _refuse(self, job: Job, error: RequestError) -> None:
        self._accountant.post(Refused(job.request.request_id, error))


def _job_of(request: Encode, kept: Encode) -> Job:
    """`kept`: the request as it is kept while its prompts are let go of."""
    # who shares no blocks shares no ids: how long an answer takes would tell them of each other
    owner = f"{len(request.domain)}:{request.domain}{request.cache_salt}"
    asked = Asked(
        tenant=request.domain,
        prompt_param=request.prompt_param,
        system_param=request.system_param,
        echo=request.echo,
        skip_special_tokens=request.skip_special_tokens,
        owner=owner,
    )
    return Job(kept, deque(request.prompts), asked)


def _explain(error: Exception, prompt_param: str, request_id: str | None) -> RequestError:
    told = failure_of(error, prompt_param)
    if told is not None:
        return told
    log.error("tokenizer.failed", request_id=request_id, error=type(error).__name__)
    return RequestError(ErrorKind.INTERNAL, "the prompt could not be tokenised")
