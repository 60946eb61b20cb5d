"""Which requests are open, and which of their sequences an engine holds: the web side's front desk.

Not an actor: a synchronous object of the web process. Handlers open and leave requests here; the tokenizer submits
through it; the accountant tells it of Terminals and failures; the supervisor's link takes from its lane.

The lane to the engine is first in, first out. `Submit` waits for a slot, looks at the request's `left` flag and goes
in with no checkpoint between; `Abort` never waits, for its Submit has made its room. So no Submit follows its own
Abort, and none goes out for a request that has left.

What must always hold: every submitted sequence is in `_live` until its Terminal or its engine's death; `leave` can be
called in any state, any number of times.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import attrs
import trio

from ..channel import Channel, Poster, Sender
from ..messages.accountant import Caller, Left, OpenAccount, Refused
from ..messages.detokenizer import Forget, Track
from ..messages.handler import Counted
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import Prompt
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from ..messages.supervisor import EngineReady
from ..messages.tokenizer import CountTokens, Encode
from ..shared.seeds import recorded_seed
from .interface import DeskClosed, Health, PromptRefused, ServingInfo, State
from .mailbox import Mailbox
from .open_requests import CountSlot, LiveSequence, OpenRequest

EngineMessage = Submit | Abort | ResetPrefixCache

NOBODY = Caller()

LAST_WORDS_S = 2.0
"""How long a drain waits for those that it failed to leave."""


class RequestTicket:
    """One open request, for its handler."""

    def __init__(self, registry: Registry, request: Encode, mailbox: Mailbox) -> None:
        self._registry = registry
        self._request: Encode | None = request
        """Until it is handed to the tokenizer: the ticket lives as long as the answer, its prompts need not."""
        self._request_id = request.request_id
        self._mailbox = mailbox

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def mailbox(self) -> Mailbox:
        return self._mailbox

    async def start(self) -> None:
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("a request is started once")
        await self._registry.hand_over(request)

    def when_encoded(self, call: Callable[[], object], /) -> None:
        self._registry.when_encoded(self._request_id, call)

    def expire(self, after_s: float) -> None:
        self._registry.expire(self._request_id, after_s)

    def leave(self) -> None:
        self._request = None
        self._registry.leave(self._request_id)


class Registry:
    """The front desk (see `front.FrontDesk`), and what the web side's actors share about open requests."""

    def __init__(
        self,
        info: ServingInfo,
        *,
        encoder: Sender[Encode | CountTokens],
        lane: Channel[EngineMessage],
        accountant: Poster[OpenAccount | Left | Refused],
        detokenizer: Poster[Track | Forget],
        metrics: Callable[[], bytes],
        trouble: Callable[[], str | None] = lambda: None,
        show_pool: Callable[[int], None] = lambda num_usable_blocks: None,
        max_open_requests: int,
    ) -> None:
        self._info = info
        self.encoder = encoder
        self.lane = lane
        self._accountant = accountant
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._trouble = trouble
        self._show_pool = show_pool
        self._max_open_requests = max_open_requests
        self._open: dict[str, OpenRequest] = {}
        self._encoding: dict[str, OpenRequest] = {}
        """Those that the tokenizer has, also when they have left: a thread may still be at their texts."""
        self._num_counts = 0
        """Of `count_tokens` that wait."""
        self._live: dict[int, LiveSequence] = {}
        self._next_sequence_id = 1
        self._health = Health(State.STARTING, 0, "the engine is loading")
        self._draining = False
        self._idle = trio.Event()
        self._idle.set()

    # ------------------------------------------------------------ for handlers

    @property
    def info(self) -> ServingInfo:
        return self._info

    def new_request_id(self) -> str:
        return f"req-{secrets.token_hex(12)}"

    def open(self, request: Encode, endpoint: str, caller: Caller = NOBODY, /) -> RequestTicket:
        if self._draining:
            raise DeskClosed("the server is shutting down")
        if self._health.state is State.FAILED:
            raise DeskClosed(f"the engine has failed: {self._health.detail}")
        self._check_room()
        mailbox = Mailbox()
        self._open[request.request_id] = OpenRequest(request.request_id, mailbox)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        seed = recorded_seed(request.sampling.seed)
        self._accountant.post(OpenAccount(request.request_id, endpoint, trio.current_time(), mailbox, caller, seed))
        return RequestTicket(self, request, mailbox)

    def _check_room(self) -> None:
        num_open = len(self._open) + self._num_counts
        if num_open >= self._max_open_requests:
            raise DeskClosed(f"{num_open} requests are open already")

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        self._check_room()
        slot = CountSlot()
        request = CountTokens(prompt, prompt_param, slot, tenant)
        del prompt
        self._num_counts += 1
        try:
            await self.encoder.send(request)
            del request
            answer = await slot.wait()
        finally:
            self._num_counts -= 1
            slot.leave()
        match answer:
            case Counted(num_tokens):
                return num_tokens
            case RequestError() as error:
                raise PromptRefused(error)
            case None:
                raise RuntimeError("a count was answered with nothing")

    async def hand_over(self, request: Encode) -> None:
        """Send a request to the tokenizer; waits while its inbox is full, but not for one that fails meanwhile.

        Its ticket's `start`.
        """
        opened = self._open.get(request.request_id)
        if opened is None:
            return
        opened.is_encoding = True
        self._encoding[request.request_id] = opened
        with trio.CancelScope() as scope:
            self.when_stopped(request.request_id, scope.cancel)
            try:
                await self.encoder.send(request)
                opened.on_stopped = None
            except BaseException:
                self.encoded(request.request_id)
                raise

    def when_encoded(self, request_id: str, call: Callable[[], object]) -> None:
        """See `Ticket.when_encoded`."""
        request = self._open.get(request_id) or self._encoding.get(request_id)
        if request is None or request.is_encoded:
            call()
        else:
            request.on_encoded.append(call)

    def expire(self, request_id: str, after_s: float) -> None:
        """A request's deadline has passed."""
        error = RequestError(ErrorKind.TIMEOUT, f"the request took longer than {after_s:g} seconds")
        self._accountant.post(Refused(request_id, error))

    def leave(self, request_id: str) -> None:
        """The request's scope has ended."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self._stop(request)
        if not request.is_encoding:
            self._call_encoded(request)
        self._accountant.post(Left(request_id, tuple(request.submitted_ids)))
        if not self._open:
            self._idle.set()

    def reset_prefix_cache(self) -> None:
        """Every request that is submitted from now on misses."""
        self.lane.post(ResetPrefixCache())

    def health(self) -> Health:
        if self._draining and self._health.state is State.READY:
            return attrs.evolve(self._health, state=State.DRAINING, detail="the server is shutting down")
        if self._health.state is State.READY and (trouble := self._trouble()) is not None:
            return attrs.evolve(self._health, state=State.REFUSING, detail=trouble)
        return self._health

    def render_metrics(self) -> bytes:
        return self._metrics()

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    @property
    def num_usable_blocks(self) -> int:
        """Of the KV cache, the null block left out; 0 until an engine has said it, where nobody else did."""
        return 0 if self._info.num_blocks is None else self._info.num_blocks - 1

    # ------------------------------------------------------------ for the tokenizer

    def new_sequence_ids(self, count: int) -> tuple[int, ...]:
        first = self._next_sequence_id
        self._next_sequence_id += count
        return tuple(range(first, first + count))

    def may_submit(self, request_id: str) -> bool:
        """Whether the request is still there. A Submit must follow with no checkpoint between."""
        request = self._open.get(request_id)
        return request is not None and not request.stopped

    def when_stopped(self, request_id: str, call: Callable[[], object]) -> None:
        """Have `call` hear that a request has left or failed; at once, if that is so already."""
        request = self._open.get(request_id)
        if request is None or request.stopped:
            call()
        else:
            request.on_stopped = call

    def encoded(self, request_id: str) -> None:
        """The tokenizer is done with a request, whatever came of it, and holds nothing of its prompts."""
        request = self._encoding.pop(request_id, None)
        if request is not None:
            request.is_encoding = False
            request.on_stopped = None
            self._call_encoded(request)

    def _call_encoded(self, request: OpenRequest) -> None:
        request.is_encoded = True
        calls, request.on_encoded = request.on_encoded, []
        for call in calls:
            call()

    def outlet(self, request_id: str) -> Mailbox:
        """Where the events of an open request go. Raises KeyError once it has left."""
        return self._open[request_id].mailbox

    async def submit(self, submit: Submit, track: Track) -> bool:
        """Send one sequence to the engine, unless its request has left. False then."""
        await self.lane.reserve()
        if not self.may_submit(track.request_id):
            self.lane.cancel_reservation()
            return False
        request = self._open[track.request_id]
        request.submitted_ids.append(submit.sequence_id)
        request.num_to_come = submit.num_to_come
        self._live[submit.sequence_id] = LiveSequence()
        self._detokenizer.post(track)
        self.lane.put_reserved(submit)
        return True

    # ------------------------------------------------------------ for detokenizer and accountant

    def abort(self, sequence_id: int) -> None:
        """Have the engine end a sequence. Nothing happens if it has been told, or has ended."""
        live = self._live.get(sequence_id)
        if live is not None and not live.aborted:
            live.aborted = True
            self.lane.post(Abort(sequence_id))

    def stop(self, request_id: str) -> tuple[int, ...]:
        """Submit nothing more of a request and end what was submitted; which sequences that were.

        Empty for a request that has left: its `Left` message has said it.
        """
        request = self._open.get(request_id)
        if request is None:
            return ()
        self._stop(request)
        return tuple(request.submitted_ids)

    def _stop(self, request: OpenRequest) -> None:
        request.stopped = True
        if request.on_stopped is not None:
            call, request.on_stopped = request.on_stopped, None
            call()
        for sequence_id in request.submitted_ids:
            self.abort(sequence_id)
        if request.num_to_come:
            request.num_to_come = 0
            self.lane.post(Abort(request.submitted_ids[0], ends_group=True))
        if request.submitted_ids:
            self._detokenizer.post(Forget(tuple(request.submitted_ids)))

    def give_up(self, sequence_ids: Sequence[int]) -> None:
        """Nothing more is expected of these; their last tokens, where they had not come, are lost."""
        for sequence_id in sequence_ids:
            self.abort(sequence_id)
        self._detokenizer.post(Forget(tuple(sequence_ids)))

    def incarnation_of(self, sequence_id: int) -> int | None:
        """The engine that holds a sequence; None: none does."""
        live = self._live.get(sequence_id)
        return None if live is None else live.incarnation

    def terminal(self, sequence_id: int) -> None:
        """The engine has answered for a sequence."""
        self._live.pop(sequence_id, None)

    # ------------------------------------------------------------ for the supervisor

    async def take_for(self, incarnation: int) -> list[EngineMessage]:
        """What goes to the engine next; from here on it holds those sequences."""
        messages = await self.lane.receive_all()
        for message in messages:
            if isinstance(message, Submit) and (live := self._live.get(message.sequence_id)) is not None:
                live.incarnation = incarnation
        return messages

    def held_by(self, incarnation: int) -> tuple[int, ...]:
        """Sequences that an engine was given and has not answered."""
        return tuple(i for i, live in self._live.items() if live.incarnation == incarnation)

    def set_health(self, health: Health) -> None:
        self._health = health

    def introduce(self, engine: EngineReady) -> None:
        """An engine is ready: what it has found out is what is served with from now on."""
        longest = self._info.max_model_len if engine.max_model_len is None else engine.max_model_len
        self._info = attrs.evolve(self._info, num_blocks=engine.num_blocks, max_model_len=longest, engine=engine)
        self._show_pool(engine.num_blocks - 1)

    async def drain(self, grace_s: float) -> None:
        """Open nothing more; wait `grace_s` seconds for the open requests, then fail those that are left."""
        self._draining = True
        with trio.move_on_after(grace_s):
            await self._idle.wait()
        for request_id in self._open:
            error = RequestError(ErrorKind.OVERLOADED, "the server shut down before this request was complete")
            self._accountant.post(Refused(request_id, error))
        with trio.move_on_after(LAST_WORDS_S):
            await self._idle.wait()
