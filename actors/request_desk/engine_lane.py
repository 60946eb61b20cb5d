"""The lane to the engine: the queue of messages to it, and what it was given and has not ended.

Owned by the request desk. The desk submits through it; the detokenizer and the desk abort sequences; the accountant
records what the engine reports, and takes back what a dead engine held; the supervisor takes what is queued for its
engine.

The queue is first in, first out. A `Submit` waits for a slot; an `Abort` never waits, since its `Submit` has made room
for it. So no `Submit` can follow its own `Abort`. What a dead engine held goes to the head of the queue, with the
tokens that were drawn; during a search for the cause of several deaths (`suspects.py`), some sequences wait outside it.

What must always hold: every submitted sequence is in `_live` until its Terminal is booked, or the death of its engine
if it is not resumed; a sequence is queued for, or held by, one engine at most.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import attrs
import trio

from ..channel import Channel
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from .open_requests import OpenRequest
from .suspects import Suspects

EngineMessage = Submit | Abort | ResetPrefixCache


@attrs.define(eq=False)
class LiveSequence:
    """A submitted sequence that has not been answered by a Terminal."""

    request: OpenRequest
    submit: Submit
    incarnation: int | None = None
    """The engine that holds it; None while it is queued, or waits for a search to end."""
    engine_id: int | None = None
    """Likewise."""
    aborted: bool = False
    has_ended: bool = False
    """The engine has drawn its last token."""
    output_token_ids: list[int] = attrs.field(factory=list)
    """Tokens that engines have reported. Empty if nothing is ever resumed."""
    num_computed: int = 0
    """Positions that were computed when its last engine died."""
    num_scored: int = 1
    """Prompt tokens whose scores were reported, if they are wanted; the first has none."""

    @property
    def request_id(self) -> str:
        return self.request.request_id


@attrs.frozen
class TakenBack:
    """What became of the sequences that a dead engine held."""

    resumed: tuple[int, ...] = ()
    """They run again, now or after others."""
    ended: tuple[int, ...] = ()
    """The engine had drawn their last token, or was to end them."""
    failed: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    """Failed, because engines died while their request was the only one that could be the cause."""


class EngineLane:
    def __init__(self, channel: Channel[EngineMessage], *, resumes: bool = True) -> None:
        """`resumes`: whether sequences survive their engine."""
        self._channel = channel
        self._resumes = resumes
        self._live: dict[int, LiveSequence] = {}
        self._suspects = Suspects()
        self._waiting: dict[int, Submit] = {}
        """Sequences that wait for a search to end, in order."""
        self._taken_back = trio.Event()
        self._next_sequence_id = 1
        self.has_same_numerics = True
        """Whether the present engine computes the same bits as the one before it."""
        self.on_resumed: Callable[[int, bool], object] = lambda num_requests, same_numerics: None
        """Called with the number of resumed requests that an engine is given."""
        self.on_unsent: Callable[[int], object] = self.mark_ended
        """Called with a sequence that was aborted while no engine could be given it: it has no Terminal."""

    def __len__(self) -> int:
        return len(self._channel)

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    def new_sequence_ids(self, count: int) -> tuple[int, ...]:
        first = self._next_sequence_id
        self._next_sequence_id += count
        return tuple(range(first, first + count))

    # ------------------------------------------------------------ for the desk

    async def reserve(self) -> None:
        """Wait for a slot for a Submit. `put_reserved` or `cancel_reservation` must follow."""
        await self._channel.reserve()

    def cancel_reservation(self) -> None:
        self._channel.cancel_reservation()

    def put_reserved(self, submit: Submit, request: OpenRequest) -> None:
        """Queue a Submit in the reserved slot."""
        self._live[submit.sequence_id] = LiveSequence(request, submit)
        if self._suspects.may_run(request.request_id):
            self._channel.put_reserved(submit)
        else:
            self._channel.cancel_reservation()
            self._waiting[submit.sequence_id] = submit

    def post(self, message: Abort | ResetPrefixCache) -> None:
        """Queue a message without waiting."""
        self._channel.post(message)

    # ------------------------------------------------------------ for accountant and detokenizer

    def abort(self, sequence_id: int) -> None:
        """Have the engine end a sequence. Does nothing if it was told before, or the sequence has ended."""
        live = self._live.get(sequence_id)
        if live is None or live.aborted:
            return
        live.aborted = True
        if self._waiting.pop(sequence_id, None) is None:
            self._channel.post(Abort(sequence_id))
        else:
            self.on_unsent(sequence_id)

    def incarnation_of(self, sequence_id: int) -> int | None:
        """Return the engine that holds a sequence; None if none does."""
        live = self._live.get(sequence_id)
        return None if live is None else live.incarnation

    def engine_of(self, sequence_id: int) -> int | None:
        """Return the id of the engine that holds a sequence; None if none does."""
        live = self._live.get(sequence_id)
        return None if live is None else live.engine_id

    def mark_ended(self, sequence_id: int) -> None:
        """Note that the engine has ended a sequence, or that no engine will."""
        live = self._live.pop(sequence_id, None)
        if live is None or not self._suspects.is_active:
            return
        if all(other.request_id != live.request_id for other in self._live.values()):
            self._suspects.on_end(live.request_id)
            self._let_run()

    def note_tokens(self, sequence_ids: Iterable[int], token_ids: Iterable[int]) -> None:
        """Record tokens that an engine has reported."""
        if not self._resumes:
            return
        live = self._live
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            if (sequence := live.get(sequence_id)) is not None:
                sequence.output_token_ids.append(token_id)

    def note_last_tokens(self, sequence_ids: Iterable[int]) -> None:
        """Note that the last tokens of these sequences were reported."""
        for sequence_id in sequence_ids:
            if (sequence := self._live.get(sequence_id)) is not None:
                sequence.has_ended = True

    def note_prompt_scores(self, sequence_id: int, end: int) -> None:
        """Note that the scores of a prompt's first `end` tokens were reported."""
        if (sequence := self._live.get(sequence_id)) is not None:
            sequence.num_scored = max(sequence.num_scored, end)

    def note_progress(self, sequence_ids: Iterable[int], ends: Iterable[int]) -> None:
        """Note up to which position an engine has computed these sequences. What is done again is no progress."""
        if not self._suspects.is_active:
            return
        requests: dict[str, None] = {}
        for sequence_id, end in zip(sequence_ids, ends, strict=True):
            live = self._live.get(sequence_id)
            if live is not None and end > live.num_computed:
                requests[live.request_id] = None
        if requests:
            self._suspects.on_progress(requests)
            self._let_run()

    def take_back(
        self,
        incarnation: int,
        held: Mapping[int, int],
        lost: Container[int],
        step_ids: Container[int] | None = None,
        *,
        is_last: bool,
    ) -> TakenBack:
        """Decide what becomes of the sequences that a dead engine held, and queue those that may run at once.

        `held`: up to which position each of them was ever computed. `lost`: sequences of which reports are missing, so
        that they cannot be resumed. `step_ids`: those of the step that it was running, if that is known. `is_last`:
        there will be no other engine. For those that are not resumed, `mark_ended` must follow.
        """
        taken = {i: live for i in held if (live := self._live.get(i)) and live.incarnation == incarnation}
        ended = {i for i, live in taken.items() if live.aborted or live.has_ended}
        resumes = self._resumes and not is_last
        failed = {i for i in taken if i not in ended and (not resumes or i in lost)}
        rest = {i: live for i, live in taken.items() if i not in ended and i not in failed}
        in_step = None if step_ids is None else {live.request_id for i, live in rest.items() if i in step_ids}
        verdict = self._suspects.on_death(list(dict.fromkeys(live.request_id for live in rest.values())), in_step)
        for sequence_id, live in taken.items():
            live.incarnation, live.engine_id, live.num_computed = None, None, held[sequence_id]
        culprits = [i for i, live in rest.items() if live.request_id == verdict.culprit]
        resumed = [i for i in rest if i not in culprits]
        again = dict(zip(resumed, _submit_again([rest[i] for i in resumed]), strict=True))
        may_run = set(verdict.resumed)
        self._waiting = {**{i: again[i] for i in resumed if rest[i].request_id not in may_run}, **self._waiting}
        self._channel.post_first([again[i] for i in resumed if rest[i].request_id in may_run])
        self._let_run()  # what came during a search that this death has ended
        self._taken_back.set()
        return TakenBack(tuple(resumed), tuple(ended), tuple(failed), tuple(culprits))

    def _let_run(self) -> None:
        """Queue the sequences that need not wait any more."""
        for sequence_id in list(self._waiting):
            if self._suspects.may_run(self._live[sequence_id].request_id):
                self._channel.post(self._waiting.pop(sequence_id))

    # ------------------------------------------------------------ for the supervisor

    @property
    def is_searching(self) -> bool:
        """Whether the cause of several deaths is being searched for, and may be a single request."""
        return self._suspects.is_searching and self._suspects.num_culprits < 2

    async def take_for(self, incarnation: int, engine_id: int = 0) -> list[EngineMessage]:
        """Wait for messages and take all that are queued for an engine, which from then on holds their sequences."""
        messages = await self._channel.receive_all()
        resumed: set[str] = set()
        for message in messages:
            if isinstance(message, Submit) and (live := self._live.get(message.sequence_id)) is not None:
                live.incarnation, live.engine_id = incarnation, engine_id
                if message.is_resumed:
                    resumed.add(live.request_id)
        if resumed:
            self.on_resumed(len(resumed), self.has_same_numerics)
        return messages

    def held_by(self, incarnation: int) -> tuple[int, ...]:
        """Return the sequences that an engine was given and has not ended."""
        return tuple(i for i, live in self._live.items() if live.incarnation == incarnation)

    async def until_taken_back(self, incarnation: int) -> None:
        """Wait until the accountant has taken back what a dead engine held."""
        while self.held_by(incarnation):
            self._taken_back = trio.Event()
            await self._taken_back.wait()


def _submit_again(sequences: Sequence[LiveSequence]) -> list[Submit]:
    """Return what to submit of sequences that are resumed, in their order."""
    again: list[Submit] = []
    groups: dict[int, Submit] = {}
    for live in reversed(sequences):
        submit = live.submit
        after = groups.get(submit.group_id) if submit.group_id else None
        if after is None:  # those that follow it have not been submitted yet
            num_to_come, tokens_to_come = live.request.num_to_come, live.request.tokens_to_come
        else:
            num_to_come, tokens_to_come = after.num_to_come + 1, after.tokens_to_come + len(after.prompt_token_ids)
        again.append(
            attrs.evolve(
                submit,
                output_token_ids=list(live.output_token_ids),
                num_scored=live.num_scored,
                is_resumed=True,
                num_to_come=num_to_come,
                tokens_to_come=tokens_to_come,
            )
        )
        groups[submit.group_id] = again[-1]
    return again[::-1]
