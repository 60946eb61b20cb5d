"""A Submit becomes a sequence, or is told at once why it cannot.

Used by the batcher. What must always hold: a sequence that is let in finishes if it is left alone with the engine; no
request is refused after its first sequence was let in; what is expected of a request that has left is not counted.
"""

from __future__ import annotations

import math

import attrs

from ..messages.outcomes import ErrorKind
from ..messages.scheduler import Submit
from .limits import Limits
from .sequence import Sequence
from .waiting import WaitingQueue


def make_sequence(message: Submit, arrival: int, limits: Limits) -> Sequence:
    sampling = message.sampling
    ends: frozenset[int] = frozenset() if sampling.ignore_eos else limits.eos_token_ids
    num_prompt_tokens = len(message.prompt_token_ids)
    return Sequence(
        id=message.sequence_id,
        arrival=arrival,
        tenant=message.tenant,
        priority=message.priority,
        tokens=list(message.prompt_token_ids),
        known_tokens=message.prompt_token_ids,
        num_prompt_tokens=num_prompt_tokens,
        root_key=message.root_key,
        keys=list(message.block_keys) if limits.enable_prefix_caching else [],
        sampling=sampling,
        stop_ids=ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends,
        max_len=num_prompt_tokens + sampling.max_tokens,
        reads_cache=message.reads_cache,
        pins=message.pins,
    )


def why_never(sequence: Sequence, limits: Limits) -> str | None:
    """Why it can never be served, or None."""
    if sequence.num_prompt_tokens == 0:
        return "the prompt is empty"
    if sequence.max_len > limits.max_model_len:
        return f"prompt and max_tokens come to {sequence.max_len} tokens, the context holds {limits.max_model_len}"
    capacity = (limits.num_blocks - 1) * limits.block_size
    if sequence.max_len > capacity:
        return f"prompt and max_tokens come to {sequence.max_len} tokens, the KV cache holds {capacity}"
    return None


@attrs.frozen
class Refusal:
    reason: str
    kind: ErrorKind


@attrs.define
class Party:
    """What is still to come of a request's sequences."""

    tenant: str
    num_sequences: int
    num_tokens: int
    refusal: Refusal | None
    """Why none of them may wait."""


class Intake:
    """Who may wait. A request's sequences come one by one, and are let in or refused as a whole when the first comes.

    Not counted are as many sequences as could run at once: they do not wait. A request that could run at once, while
    nobody waits, is let in however long its prompts are.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parties: dict[int, Party] = {}
        """By first sequence, until the last has come or none will."""

    @property
    def num_parties(self) -> int:
        return len(self._parties)

    def why_not(self, message: Submit, waiting: WaitingQueue, num_running: int) -> Refusal | None:
        """Why it may not even wait, or None: it is expected, or there is room for it and those that follow it."""
        party = self._parties.get(message.party_id)
        if party is not None:
            party.num_sequences -= 1
            party.num_tokens -= len(message.prompt_token_ids)
            if party.num_sequences <= 0:
                del self._parties[message.party_id]
            return party.refusal
        refusal = self._why_not_all(message, waiting, num_running)
        if message.num_to_come:
            party = Party(message.tenant, message.num_to_come, message.tokens_to_come, refusal)
            self._parties[message.party_id] = party
        return refusal

    def end_party(self, party_id: int) -> None:
        """Nothing more of a request will come."""
        self._parties.pop(party_id, None)

    def _why_not_all(self, message: Submit, waiting: WaitingQueue, num_running: int) -> Refusal | None:
        limits = self._limits
        num_new = 1 + message.num_to_come
        tokens_new = len(message.prompt_token_ids) + message.tokens_to_come
        coming = [party for party in self._parties.values() if party.refusal is None]
        num_seats = max(0, limits.max_num_seqs - num_running)
        if not len(waiting) and not coming and num_new <= num_seats:
            return None
        own = [party for party in coming if party.tenant == message.tenant]
        everybody = _Crowd("all requests", len(waiting), waiting.num_tokens, coming, 1.0)
        tenant = _Crowd(
            "the requests of one tenant",
            waiting.num_of(message.tenant),
            waiting.num_tokens_of(message.tenant),
            own,
            limits.max_waiting_share,
        )
        for crowd in (everybody, tenant):
            most, most_tokens = crowd.part(limits.max_waiting_requests), crowd.part(limits.max_waiting_tokens)
            if most and crowd.num_sequences + num_new > most + num_seats:
                kind = ErrorKind.INVALID if num_new > most + limits.max_num_seqs else ErrorKind.OVERLOADED
                return Refusal(crowd.words(crowd.num_sequences, "sequences", most, num_new), kind)
            if most_tokens and crowd.num_tokens + tokens_new > most_tokens:
                fits_alone = tokens_new <= most_tokens or num_new <= limits.max_num_seqs
                kind = ErrorKind.OVERLOADED if fits_alone else ErrorKind.INVALID
                return Refusal(crowd.words(crowd.num_tokens, "prompt tokens", most_tokens, tokens_new), kind)
        return None


class _Crowd:
    """Those who wait, as far as one bound concerns them."""

    def __init__(self, name: str, num_waiting: int, num_tokens: int, coming: list[Party], share: float) -> None:
        self.name = name
        self.num_sequences = num_waiting + sum(party.num_sequences for party in coming)
        self.num_tokens = num_tokens + sum(party.num_tokens for party in coming)
        self._share = share

    def part(self, bound: int) -> int:
        return math.ceil(bound * self._share)

    def words(self, num: int, what: str, most: int, num_new: int) -> str:
        return f"{num} {what} are waiting already; of {self.name} {most} may, and this request has {num_new}"
