"""The sequences that were submitted and have not ended, and the queue on which they go to the router.

Owned by the request desk, which submits through it. The detokenizer and the desk abort sequences; the accountant
records what engines report, and takes back what a dead one held; each engine's link takes what the router has queued.

The queue is first in, first out. A `Submit` waits for a slot, which it keeps until an engine takes it; then its request
is checked, so that none is queued for one that has left. An `Abort` never waits, so no `Submit` can follow its own
`Abort`. What a dead engine held goes to the head of the queue, with the tokens that were drawn; during a search for the
cause of several deaths (`suspects.py`), some sequences wait outside it.

What must always hold: every submitted sequence is in `_live` until its Terminal is booked, or the death of its engine
if it is not resumed; a sequence is queued for, or held by, one engine at most.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import attrs
import trio

from ..messages.block_manager import LookUp
from ..messages.peers import Peer
from ..messages.router import SequenceEnded
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from .engine_pool import EngineMessage, PooledEngine
from .live_sequence import FormerEngine, LiveSequence, RouterInbox, TakenBack, submit_again
from .lookups import Lookups
from .open_requests import OpenRequest
from .suspects import Suspects


class LiveSequences:
    def __init__(self, channel: RouterInbox, num_slots: int, *, resumes: bool = True) -> None:
        """`num_slots`: Submits that may wait for an engine. `resumes`: whether sequences survive theirs."""
        self._channel = channel
        self.slots = trio.Semaphore(num_slots)
        """For Submits that no engine has taken."""
        self._resumes = resumes
        self._live: dict[int, LiveSequence] = {}
        self._suspects = Suspects()
        self._waiting: dict[int, Submit] = {}
        """Sequences that wait for a search to end, in order."""
        self.lookups = Lookups(channel.post)
        self._next_sequence_id = 1
        self._released = trio.Event()
        """Set, and replaced, when an engine holds less than before."""
        self.on_resumed: Callable[[int, bool], object] = lambda num_requests, same_numerics: None
        """Called with the number of resumed requests that an engine is given."""
        self.on_unsent: Callable[[int], object] = self.mark_ended
        """Called with a sequence that was aborted while no engine could be given it: it has no Terminal."""

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    def new_sequence_ids(self, count: int) -> tuple[int, ...]:
        first = self._next_sequence_id
        self._next_sequence_id += count
        return tuple(range(first, first + count))

    # ------------------------------------------------------------ for the desk

    async def submit(self, submit: Submit, request: OpenRequest) -> bool:
        """Wait for a slot and queue a Submit, once; return False if its request has left or failed meanwhile."""
        if submit.sequence_id in self._live:
            return True  # a tokenizer that has died since has queued it
        await self.slots.acquire()
        if request.stopped:
            self.slots.release()
            return False
        self.put(submit, request)
        return True

    def put(self, submit: Submit, request: OpenRequest) -> None:
        request.note_submitted(submit)
        live = self._live[submit.sequence_id] = LiveSequence(request, submit, has_slot=True)
        if self._suspects.may_run(request.request_id):
            self._channel.post(submit)
        else:
            self._free_slot(live)
            self._waiting[submit.sequence_id] = submit

    def post(self, message: Abort | ResetPrefixCache) -> None:
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

    def mark_ended(self, sequence_id: int) -> None:
        """Note that the engine has ended a sequence, or that no engine will."""
        if (live := self._live.pop(sequence_id, None)) is None:
            return
        self._free_slot(live)
        live.request.note_ended()
        self._channel.post(SequenceEnded(sequence_id))
        self.note_released()
        if not self._suspects.is_active:
            return
        if all(other.request_id != live.request_id for other in self._live.values()):
            self._suspects.on_end(live.request_id)
            self._let_run()

    def note_tokens(self, sequence_ids: Iterable[int], token_ids: Iterable[int]) -> None:
        if not self._resumes:
            return
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            if (sequence := self._live.get(sequence_id)) is not None:
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
        """Note up to which position an engine has computed these sequences; recomputing is no progress."""
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
            live.num_computed = held[sequence_id]
            live.forget_engine()
        culprits = [i for i, live in rest.items() if live.request_id == verdict.culprit]
        resumed = [i for i in rest if i not in culprits]
        again = dict(zip(resumed, submit_again([rest[i] for i in resumed]), strict=True))
        may_run = set(verdict.resumed)
        self._waiting = {**{i: again[i] for i in resumed if rest[i].request_id not in may_run}, **self._waiting}
        self._channel.post_first([again[i] for i in resumed if rest[i].request_id in may_run])
        self._let_run()  # what came during a search that this death has ended
        self.note_released()
        return TakenBack(tuple(resumed), tuple(ended), tuple(failed), tuple(culprits))

    def _let_run(self) -> None:
        """Queue the sequences that may run now."""
        for sequence_id in list(self._waiting):
            if self._suspects.may_run(self._live[sequence_id].request_id):
                self._channel.post(self._waiting.pop(sequence_id))

    def _free_slot(self, live: LiveSequence) -> None:
        if live.has_slot:
            live.has_slot = False
            self.slots.release()

    # ------------------------------------------------------------ for supervisors and links

    @property
    def is_searching(self) -> bool:
        """Whether the cause of several deaths is being searched for, and may be a single request."""
        return self._suspects.is_searching and self._suspects.num_culprits < 2

    async def take_for(self, engine: PooledEngine, incarnation: int) -> list[EngineMessage]:
        """Wait for messages and take all that are queued for an engine, which from then on holds their sequences."""
        messages = await engine.queue.receive_all()
        numerics, address = ("", "") if engine.ready is None else (engine.ready.numerics, engine.ready.peer_address)
        held_at = FormerEngine(Peer(engine.engine_id, address), incarnation) if address else None
        resumed, wanted = dict[str, bool](), list[EngineMessage]()
        for message in messages:
            if isinstance(message, LookUp) and not self.lookups.take(message, engine.engine_id):
                continue
            wanted.append(message)
            engine.awaits_reset |= isinstance(message, ResetPrefixCache)
            if isinstance(message, Submit) and (live := self._live.get(message.sequence_id)) is not None:
                self._free_slot(live)
                if message.is_resumed and not live.leaves_as_planned:
                    resumed[live.request_id] = live.numerics in (None, numerics)
                live.incarnation, live.engine_id, live.numerics = incarnation, engine.engine_id, numerics
                live.held_at, live.leaves_as_planned, live.goes_to = held_at, False, frozenset()
                live.ends_after_prefill = live.moves = message.ends_after_prefill
        for is_same in resumed.values():
            self.on_resumed(1, is_same)
        return wanted

    def held_by(self, incarnation: int) -> tuple[int, ...]:
        """Return the sequences that an engine was given and has not ended."""
        return tuple(i for i, live in self._live.items() if live.incarnation == incarnation)

    async def until_taken_back(self, incarnation: int) -> None:
        """Wait until the accountant has taken back what a dead engine held."""
        while self.held_by(incarnation):
            await self._released.wait()

    def find(self, sequence_id: int) -> LiveSequence | None:
        """Return what is kept of a sequence; None if it has ended."""
        return self._live.get(sequence_id)

    # ------------------------------------------------------------ engines that are to end

    async def until_idle(self, engine: PooledEngine) -> None:
        """Wait until an engine holds nothing, and nothing is queued for it that it could still take."""
        while engine.has_queued or any(live.engine_id == engine.engine_id for live in self._live.values()):
            await self._released.wait()

    async def until_moved(self, engine: PooledEngine) -> None:
        """Wait until no sequence that has left an engine with its blocks may still fetch them."""
        while any(live.is_moving and live.left(engine) for live in self._live.values()):
            await self._released.wait()

    def note_admitted(self, sequence_ids: Iterable[int], incarnation: int) -> None:
        """Note that an engine has admitted sequences: what it wanted of their blocks it has."""
        has_moved = False
        for sequence_id in sequence_ids:
            live = self._live.get(sequence_id)
            if live is not None and live.is_moving and live.incarnation == incarnation:
                live.is_moving, has_moved = False, True
        if has_moved:
            self.note_released()

    def note_released(self) -> None:
        """Have everybody who waits for an engine look again."""
        released, self._released = self._released, trio.Event()
        released.set()

    async def until_released(self) -> None:
        """Wait until `note_released` is called, which it is when a sequence ends."""
        await self._released.wait()

    def has_adapter(self, digest: str) -> bool:
        return any(live.submit.adapter == digest for live in self._live.values())

    def requests_on(self, engine: PooledEngine) -> set[str]:
        return {live.request_id for live in self._live.values() if live.engine_id == engine.engine_id}

    def hand_over(self, engine: PooledEngine, sequence_ids: Iterable[int], *, with_blocks: bool = False) -> int:
        """Have an engine end those of these sequences that it holds, so that others resume them; return how many.

        `with_blocks`: the others may fetch their blocks from it, so it must not end before `until_moved` returns.
        """
        num_handed_over = 0
        for sequence_id in sequence_ids:
            live = self._live.get(sequence_id)
            if live is not None and live.engine_id == engine.engine_id and not live.is_about_to_end:
                live.is_handed_over, live.moves = True, with_blocks
                num_handed_over += 1
                engine.queue.post(Abort(sequence_id))
        return num_handed_over

    def resume_elsewhere(self, sequence_id: int, *, was_admitted: bool = True) -> bool:
        """Submit a sequence again that an engine has ended so that another one resumes it, with blocks if it had any.

        Returns False for one that has ended for good, or has no such engine.
        """
        live = self._live.get(sequence_id)
        if live is None or live.aborted or live.has_ended or not self._resumes:
            return False
        if not (live.is_handed_over or live.ends_after_prefill):
            return False
        live.leave(with_blocks=was_admitted)
        (again,) = submit_again([live])
        # those of its group that follow are not announced a second time
        self._channel.post_first([attrs.evolve(again, num_to_come=0, tokens_to_come=0)])
        self.note_released()
        return True
