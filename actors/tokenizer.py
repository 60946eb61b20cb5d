"""The tokenizer: from prompts to sequences with block keys.

Hears `Encode` from handlers; submits one sequence per (prompt, choice) through the registry's lane; tells the
accountant the prompts' lengths before that (`Prompted`), or why the request cannot be served (`Refused`). Answers
`CountTokens` by itself. Long texts are encoded in a worker thread (the library releases the interpreter lock). A prompt
that makes the tokenizer raise fails its own request only. Of a chat, the turns that the same domain has sent before are
not tokenised again (`core/segments.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import structlog
import trio

from quipu.actors.channel import Poster, Receiver
from quipu.actors.config import HouseConfig
from quipu.actors.core.drawing import complete_rules, contradiction, sequence_seed
from quipu.actors.core.pins import in_whole_blocks, pins_of
from quipu.actors.core.prefix import chain_keys, root_key
from quipu.actors.core.prompt_scores import prompt_scoring, too_many_scores
from quipu.actors.core.room import output_room, too_long
from quipu.actors.core.segments import SegmentCache
from quipu.actors.messages import (
    Breakpoint,
    ChatPrompt,
    Counted,
    CountTokens,
    Encode,
    ErrorKind,
    Prompt,
    Prompted,
    PromptText,
    Refused,
    RequestError,
    SamplingParams,
    Submit,
    TextPrompt,
    TokenPrompt,
    Track,
)
from quipu.actors.registry import Registry
from quipu.actors.vocabulary import TemplateError, Vocabulary

log = structlog.get_logger()

INLINE_CHARACTERS = 4096
"""Shorter texts are encoded in the loop: a round trip to a thread costs more than they do."""
PROMPT_TAIL = 8
"""Prompt ids that a decoder may want to see before the first output."""


TokenizerMessage = Encode | CountTokens


@attrs.frozen
class EncodedPrompt:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...] = ()
    echo: PromptText | None = None


class TokenizerActor:
    def __init__(
        self, config: HouseConfig, vocabulary: Vocabulary, registry: Registry, accountant: Poster[Prompted | Refused]
    ) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._registry = registry
        self._accountant = accountant
        self._segments = SegmentCache(config.token_cache_bytes)

    async def run(self, inbox: Receiver[TokenizerMessage]) -> None:
        """Encode until cancelled."""
        while True:
            for request in await inbox.receive_all():
                if isinstance(request, CountTokens):
                    await self._count(request)
                    continue
                if not self._registry.may_submit(request.request_id):
                    continue
                try:
                    await self._serve(request)
                except Exception as error:
                    log.error("tokenizer.failed", request_id=request.request_id, error=type(error).__name__)
                    self._refuse(request, RequestError(ErrorKind.INTERNAL, "the prompt could not be tokenised"))

    async def _count(self, request: CountTokens) -> None:
        answer: Counted | RequestError
        try:
            answer = Counted(len((await self._encode(request.prompt)).token_ids))
        except TemplateError as error:
            answer = RequestError(ErrorKind.INVALID, str(error), request.prompt_param)
        except Exception as error:
            log.error("tokenizer.failed", error=type(error).__name__)
            answer = RequestError(ErrorKind.INTERNAL, "the prompt could not be tokenised")
        request.outlet.put(answer)

    async def _serve(self, request: Encode) -> None:
        prompts: list[EncodedPrompt] = []
        for asked in request.prompts:
            try:
                prompts.append(await self._encode(asked, request))
            except TemplateError as error:
                self._refuse(request, RequestError(ErrorKind.INVALID, str(error), request.prompt_param))
                return
        budgets: list[int] = []
        longest = self._registry.info.max_model_len
        for asked, prompt in zip(request.prompts, prompts, strict=True):
            budget = output_room(request, len(prompt.token_ids), longest)
            if isinstance(budget, RequestError):
                self._refuse(request, await self._blame(request, asked, budget, longest))
                return
            budgets.append(budget)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        config = self._config
        if refusal := too_many_scores(request, lengths, budgets, config.max_prompt_scores, config.max_output_scores):
            self._refuse(request, refusal)
            return
        sampling = await self._complete_sampling(request)
        if (conflict := contradiction(sampling.rules)) is not None:
            self._refuse(request, conflict)
            return
        await self._submit(request, prompts, budgets, sampling)

    async def _complete_sampling(self, request: Encode) -> SamplingParams:
        """What no output may hold, and what would end it too early, as tokens."""
        words: list[tuple[int, ...]] = []
        if request.bad_words:
            words = await trio.to_thread.run_sync(_encode_bad_words, self._vocabulary, request.bad_words)
        engine = self._config.engine
        return complete_rules(request.sampling, words, engine.eos_token_ids, self._config.vocab_size)

    async def _encode(self, prompt: Prompt, request: Encode | None = None) -> EncodedPrompt:
        with_echo = request is not None and request.echo
        match prompt:
            case TokenPrompt():
                return EncodedPrompt(list(prompt.token_ids), echo=self._read_back(prompt, request))
            case TextPrompt():
                if len(prompt.text) <= INLINE_CHARACTERS:
                    return self._encode_text(prompt.text, with_echo)
                return await trio.to_thread.run_sync(self._encode_text, prompt.text, with_echo)
            case ChatPrompt():
                # with tools, or with marks to look for, it is seldom short
                num_characters = sum(len(str(message.get("content", ""))) for message in prompt.messages)
                if num_characters <= INLINE_CHARACTERS and not prompt.tools and not prompt.marks:
                    return self._encode_chat(prompt, request)
                return await trio.to_thread.run_sync(self._encode_chat, prompt, request)

    def _encode_text(self, text: str, with_echo: bool) -> EncodedPrompt:
        if not with_echo:
            return EncodedPrompt(self._vocabulary.encode(text))
        encoded = self._vocabulary.encode_for_echo(text)
        return EncodedPrompt(encoded.token_ids, echo=encoded.echo)

    def _read_back(self, prompt: TokenPrompt, request: Encode | None) -> PromptText | None:
        if request is None or not request.echo or not prompt.token_ids:
            return None
        return self._vocabulary.read_back(prompt.token_ids, skip_special_tokens=request.skip_special_tokens)

    def _encode_chat(self, prompt: ChatPrompt, request: Encode | None) -> EncodedPrompt:
        if request is None:
            encoded = self._vocabulary.encode_chat(prompt)
        else:
            # who shares no blocks shares no ids: how long an answer takes would tell them of each other
            owner = f"{len(request.domain)}:{request.domain}{request.cache_salt}"
            encoded = self._vocabulary.encode_chat(prompt, self._segments, owner)
        return EncodedPrompt(encoded.token_ids, encoded.breakpoints)

    async def _blame(self, request: Encode, prompt: Prompt, error: RequestError, longest: int) -> RequestError:
        """Why a prompt cannot be served: in the name of its system message's field, where that alone is too long."""
        if not request.system_param or error.param != request.prompt_param or not isinstance(prompt, ChatPrompt):
            return error
        first = prompt.messages[0]
        if first["role"] != "system":
            return error
        num_tokens = len(await trio.to_thread.run_sync(self._vocabulary.encode, str(first["content"])))
        return error if num_tokens < longest else too_long(request.system_param, num_tokens, longest)

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
        sequence_ids = self._registry.new_sequence_ids(len(places))
        if not self._registry.may_submit(request.request_id):
            return
        outlet = self._registry.outlet(request.request_id)
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
        keys_of: dict[int, list[bytes]] = {}
        tokens_to_come = sum(len(prompts[prompt].token_ids) for prompt, _ in places)
        for index, (sequence_id, (prompt, choice)) in enumerate(zip(sequence_ids, places, strict=True)):
            token_ids = prompts[prompt].token_ids
            if prompt not in keys_of:
                keys_of[prompt] = chain_keys(root, token_ids, engine.block_size) if engine.enable_prefix_caching else []
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
                party_id=sequence_ids[0],
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
            if not await self._registry.submit(submit, track):
                return

    def _refuse(self, request: Encode, error: RequestError) -> None:
        self._accountant.post(Refused(request.request_id, error))


def _encode_bad_words(vocabulary: Vocabulary, words: Sequence[str]) -> list[tuple[int, ...]]:
    return [ids for word in words for ids in vocabulary.encode_bad_word(word)]
