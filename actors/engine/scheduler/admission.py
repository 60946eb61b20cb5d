"""Turns a `Submit` into a sequence, or says why it is refused.

Used by the batcher. What must always hold: an accepted sequence can finish if it has the engine to itself; no request
is refused after its first sequence was accepted; sequences still expected of a request that has left are not counted.
"""

from __future__ import annotations

import math

import attrs

from ...messages.outcomes import ErrorKind
from ...messages.scheduler import SequenceKind, Submit
from ...shared.block_keys import chain_image_keys
from .config import SchedulerConfig
from .sequence import Sequence
from .waiting import WaitingQueue


def make_sequence(message: Submit, arrival: int, config: SchedulerConfig) -> Sequence:
    sampling = message.sampling
    # an output that has matched its grammar to the end can only end, so that `ignore_eos` does not apply to it
    ignores_eos = sampling.ignore_eos and sampling.grammar is None
    ends: frozenset[int] = frozenset() if ignores_eos else config.eos_token_ids
    num_prompt_tokens = len(message.prompt_token_ids)
    known, keys = message.prompt_token_ids, message.block_keys if config.enable_prefix_caching else []
    if message.output_token_ids:
        known = known + message.output_token_ids
        if config.enable_prefix_caching:
            num_keyed, parent = len(keys) * config.block_size, keys[-1] if keys else message.root_key
            keys = keys + chain_image_keys(parent, known[num_keyed:], config.block_size, message.images, num_keyed)
    # nothing is drawn for a vector
    full_len = num_prompt_tokens + (sampling.max_tokens if message.kind is SequenceKind.GENERATE else 0)
    return Sequence(
        id=message.sequence_id,
        arrival=arrival,
        tenant=message.tenant,
        priority=message.priority,
        is_batch=message.is_batch,
        tokens=list(known),
        known_tokens=known,
        num_prompt_tokens=num_prompt_tokens,
        root_key=message.root_key,
        keys=list(keys),
        sampling=sampling,
        stop_ids=ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends,
        max_len=min(full_len, len(known) + 1) if message.ends_after_prefill else full_len,
        full_len=full_len,
        reads_cache=message.reads_cache,
        pins=message.pins,
        kind=message.kind,
        adapter=message.adapter,
        images=message.images,
        whole_images=message.images if config.whole_image_tokens else (),
        peer=message.peer,
        num_scored=message.num_scored,
    )


def why_never(sequence: Sequence, config: SchedulerConfig) -> str | None:
    """Return why a sequence can never be served, or None if it can."""
    if sequence.num_prompt_tokens == 0:
        return "The prompt must not be empty."
    if sequence.full_len > config.max_model_len:
        return (
            f"The prompt and `max_tokens` add up to {sequence.full_len} tokens, which exceeds the context length of "
            f"{config.max_model_len}."
        )
    capacity = (config.num_blocks - 1) * config.block_size
    if sequence.full_len > capacity:
        return (
            f"The prompt and `max_tokens` add up to {sequence.full_len} tokens, which exceeds the KV cache capacity of "
            f"{capacity}."
        )
    return None


@attrs.frozen
class Refusal:
    reason: str
    kind: ErrorKind


@attrs.define
class RequestGroup:
    """The sequences of one request that have not been submitted yet."""

    tenant: str
    num_sequences: int
    num_tokens: int
    refusal: Refusal | None
    """Why none of them may wait."""


class AdmissionControl:
    """Decides which requests may wait.

    The sequences of a request are submitted one by one, and are accepted or refused as a whole when the first arrives.
    As many sequences as could run at once do not count: they do not wait. A request that could run at once while
    nothing is waiting is accepted however long its prompts are. Of a request with more sequences than may be submitted
    at a time, the first ones are accepted or refused, and each later one has the place of one that has ended.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._groups: dict[int, RequestGroup] = {}
        """By first sequence, until the last has been submitted or none will be."""

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def refusal_of(self, message: Submit, waiting: WaitingQueue, num_running: int) -> Refusal | None:
        """Return why a sequence may not even wait, or None if there is room for it and those that follow it."""
        group = self._groups.get(message.group_id)
        if group is not None:
            group.num_sequences -= 1
            group.num_tokens -= len(message.prompt_token_ids)
            if group.num_sequences <= 0:
                del self._groups[message.group_id]
            return group.refusal
        has_place = message.is_resumed or message.takes_place
        refusal = None if has_place else self._refusal_of_group(message, waiting, num_running)
        if message.num_to_come:
            group = RequestGroup(message.tenant, message.num_to_come, message.tokens_to_come, refusal)
            self._groups[message.group_id] = group
        return refusal

    def end_group(self, group_id: int) -> None:
        """Expect no further sequences of a request."""
        self._groups.pop(group_id, None)

    def _refusal_of_group(self, message: Submit, waiting: WaitingQueue, num_running: int) -> Refusal | None:
        config = self._config
        num_new = 1 + message.num_to_come
        tokens_new = len(message.prompt_token_ids) + message.tokens_to_come
        expected = [group for group in self._groups.values() if group.refusal is None]
        num_free_seqs = max(0, config.max_num_seqs - num_running)
        if not len(waiting) and not expected and num_new <= num_free_seqs:
            return None
        own = [group for group in expected if group.tenant == message.tenant]
        loads = (
            _WaitingLoad("all requests", len(waiting), waiting.num_tokens, expected, 1.0),
            _WaitingLoad(
                "this tenant",
                waiting.num_of(message.tenant),
                waiting.num_tokens_of(message.tenant),
                own,
                config.max_waiting_share,
            ),
        )
        for load in loads:
            limit, token_limit = load.share_of(config.max_waiting_requests), load.share_of(config.max_waiting_tokens)
            if limit and load.num_sequences + num_new > limit + num_free_seqs:
                kind = ErrorKind.INVALID if num_new > limit + config.max_num_seqs else ErrorKind.OVERLOADED
                return Refusal(load.message(load.num_sequences, "sequences", limit, num_new), kind)
            if token_limit and load.num_tokens + tokens_new > token_limit:
                fits_alone = tokens_new <= token_limit or num_new <= config.max_num_seqs
                kind = ErrorKind.OVERLOADED if fits_alone else ErrorKind.INVALID
                return Refusal(load.message(load.num_tokens, "prompt tokens", token_limit, tokens_new), kind)
        return None


class _WaitingLoad:
    """What is waiting or expected, counted against one limit."""

    def __init__(
        self, scope: str, num_waiting: int, num_tokens: int, expected: list[RequestGroup], share: float
    ) -> None:
        self.scope = scope
        self.num_sequences = num_waiting + sum(group.num_sequences for group in expected)
        self.num_tokens = num_tokens + sum(group.num_tokens for group in expected)
        self._share = share

    def share_of(self, limit: int) -> int:
        return math.ceil(limit * self._share)

    def message(self, num: int, unit: str, limit: int, num_new: int) -> str:
        return (
            f"Too many {unit} are waiting: the limit for {self.scope} is {limit}, {num} are waiting, and this request "
            f"adds {num_new}."
        )
