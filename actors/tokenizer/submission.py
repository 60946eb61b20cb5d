"""From encoded prompts to the messages that announce and submit their sequences, one per prompt and choice.

Used by the tokenizer. What must always hold: the root of the block keys contains the cache domain and the salt, so
nobody finds blocks of another domain; sequences are numbered by prompt, then by choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ..config.runtime_config import RuntimeConfig
from ..messages.accountant import Prompted
from ..messages.detokenizer import Track
from ..messages.explanations import PromptNotes
from ..messages.handler import Outlet
from ..messages.sampling import SamplingParams
from ..messages.scheduler import SequenceKind, Submit
from ..messages.tokenizer import Encode
from ..shared.block_keys import root_key
from ..shared.breakpoints import in_whole_blocks, pins_of
from ..shared.seeds import sequence_seed
from .context_length import least_output
from .prompt_encoder import EncodedPrompt
from .prompt_scoring import reads_cache
from .thinking_budget import sampling_after

DECODER_TAIL = 8
"""Prompt ids that a decoder may need as context for the first output."""
KV_LAYOUTS = {"int8": "head_major, float32 scales of tokens"}
"""Layouts of the KV cache in block keys, by dtype; "head_major" for all others."""
PARSER_TAIL = 64
"""Prompt ids in which reasoning may have been opened: more than a template writes after the question."""


def root_key_of(request: Encode, config: RuntimeConfig) -> bytes:
    """Return the key that the block keys of a request's prompts start from."""
    return root_key(
        domain=request.domain,
        salt=request.cache_salt,
        adapter=request.adapter,
        model=config.model_names[0],
        kv_dtype=config.kv_dtype,
        kv_layout=KV_LAYOUTS.get(config.kv_dtype, "head_major"),
        block_size=config.engine.block_size,
    )


@attrs.frozen
class Submission:
    """A request that is ready to be submitted. `prompts`, `budgets` and `block_keys` have equal lengths."""

    request: Encode
    prompts: Sequence[EncodedPrompt]
    budgets: Sequence[int]
    """Output tokens that each prompt may have."""
    sampling: SamplingParams
    root_key: bytes
    block_keys: Sequence[list[bytes]]
    config: RuntimeConfig
    special_token_ids: frozenset[int]
    prompts_apart: bool = False
    """Several engines may serve its prompts, so that each prompt's choices are a group of their own."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.request.num_choices

    def _places(self) -> list[tuple[int, int]]:
        return [(prompt, choice) for prompt in range(len(self.prompts)) for choice in range(self.request.num_choices)]

    def prompted(self, sequence_ids: tuple[int, ...]) -> Prompted:
        places, prompts = self._places(), self.prompts
        block_size = self.config.engine.block_size
        return Prompted(
            request_id=self.request.request_id,
            sequence_ids=sequence_ids,
            prompt_indexes=tuple(prompt for prompt, _ in places),
            choice_indexes=tuple(choice for _, choice in places),
            num_prompt_tokens=tuple(len(prompts[prompt].token_ids) for prompt, _ in places),
            breakpoints=tuple(in_whole_blocks(prompts[prompt].breakpoints, block_size) for prompt, _ in places),
            block_keys=tuple(self.block_keys),
            notes=tuple(PromptNotes(prompt.outline, prompt.advice) for prompt in prompts),
        )

    def _num_accepted(self, num_sequences: int) -> int:
        """Return how many sequences may be refused for lack of room: the first ones, whose places later ones take."""
        window, num_choices = self.config.submit_window, self.request.num_choices
        return num_sequences if num_sequences <= window else -(-window // num_choices) * num_choices

    def messages(self, sequence_ids: tuple[int, ...], outlet: Outlet) -> Iterator[tuple[Submit, Track]]:
        request, sampling, engine = self.request, self.sampling, self.config.engine
        places = self._places()
        tail_length = DECODER_TAIL if request.output is None else PARSER_TAIL
        num_accepted = self._num_accepted(len(places))
        group_id = group_end = tokens_to_come = 0
        first_reads_cache, is_scored = reads_cache(request, engine.pooling), sampling.prompt_logprobs is not None
        least = least_output(request)
        for index, (sequence_id, (prompt, choice)) in enumerate(zip(sequence_ids, places, strict=True)):
            encoded, budget = self.prompts[prompt], self.budgets[prompt]
            token_ids = encoded.token_ids
            if index == group_end:
                together = index < num_accepted and not self.prompts_apart
                group_id, group_end = sequence_id, num_accepted if together else index + request.num_choices
                tokens_to_come = sum(len(self.prompts[prompt].token_ids) for prompt, _ in places[index:group_end])
            tokens_to_come -= len(token_ids)
            submit = Submit(
                sequence_id=sequence_id,
                prompt_token_ids=token_ids,
                root_key=self.root_key,
                block_keys=self.block_keys[prompt],
                tenant=request.domain,
                priority=request.priority,
                is_batch=request.is_batch,
                sampling=attrs.evolve(
                    sampling_after(token_ids, sampling, self.special_token_ids),
                    max_tokens=max(budget, least),
                    seed=sequence_seed(sampling.seed, prompt, choice),
                    prompt_logprobs=sampling.prompt_logprobs if choice == 0 else None,
                ),
                reads_cache=choice > 0 or first_reads_cache,
                pins=pins_of(encoded.breakpoints, engine.block_size) if engine.enable_prefix_caching else (),
                group_id=group_id,
                num_to_come=group_end - index - 1,
                tokens_to_come=tokens_to_come,
                takes_place=index >= num_accepted,
                affinity=request.affinity,
                kind=request.kind,
                adapter=request.adapter,
                images=encoded.images,
            )
            track = Track(
                request_id=request.request_id,
                sequence_id=sequence_id,
                index=index,
                prompt_tail=tuple(token_ids[-tail_length:]),
                stop=request.stop,
                include_stop=request.include_stop,
                skip_special_tokens=request.skip_special_tokens,
                outlet=outlet,
                is_scored=sampling.logprobs is not None,
                scores_from=sequence_id - choice if is_scored else None,
                num_prompt_scores=len(token_ids) - 1 if is_scored else 0,
                echo=encoded.echo,
                prompt_only=budget == 0,
                wants_vector=request.kind is not SequenceKind.GENERATE,
                min_tokens=0 if sampling.rules is None else sampling.rules.min_tokens,
                output=request.output,
                prompt_token_ids=token_ids if request.with_token_ids else None,
            )
            yield submit, track
