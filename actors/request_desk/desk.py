"""The request desk: which requests are open, what of them goes to the engine, and what the web layer may ask.

Not an actor but a synchronous object of the web process, shared by everyone in it. Handlers open and leave requests
here; the tokenizer submits through it; the accountant stops failed requests; the supervisor sets the health.

What must always hold: `leave` can be called in any state and any number of times.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import trio

from ..cache_insight.cache_watch import CacheWatch
from ..channel import Poster, Sender
from ..messages.accountant import Caller, Left, OpenAccount, Refused
from ..messages.detokenizer import Forget, Track
from ..messages.handler import KeepAnswer, PromptRead
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..messages.prompts import Prompt, Truncation
from ..messages.scheduler import Abort, ResetPrefixCache, SequenceKind, Submit
from ..messages.tokenizer import Encode, PromptQuestion, ReadPrompt
from ..messages.upstream import Forward
from ..shared.seeds import recorded_seed
from .adapters import Adapters
from .engine_pool import EnginePool
from .health import EngineStatus, Health, State, Withheld
from .interface import DeskClosed, EngineControl, Explain, Forwarding, PromptLookUp, ServingInfo
from .live_sequences import LiveSequences
from .open_requests import OpenRequest
from .prompt_questions import PromptQuestions

ANONYMOUS = Caller()
FINAL_RECORDS_S = 2.0
"""How long a drain waits for the requests that it has failed to leave."""


class RequestDesk:
    """Implements `interface.Desk`, and holds what the web process's actors share about open requests."""

    def __init__(
        self,
        info: ServingInfo,
        *,
        encoder: Sender[OpenRequest | PromptQuestion],
        sequences: LiveSequences,
        engines: EnginePool,
        accountant: Poster[OpenAccount | Left | Refused],
        detokenizer: Poster[Track | Forget],
        metrics: Callable[[], bytes],
        trouble: Callable[[], str | None] = lambda: None,
        max_open_requests: int,
        max_loras: int = 0,
        lora_modules: Mapping[str, str] | None = None,
    ) -> None:
        """`lora_modules`: folders of adapters by name, `max_loras` of which may be served; 0: none."""
        self.info = info
        self.sequences = sequences
        self.adapters = Adapters(
            engines,
            max_loras=max_loras,
            modules=lora_modules or {},
            is_used=self._uses_adapter,
            until_released=sequences.until_released,
            note_released=sequences.note_released,
        )
        self.adapters.on_changed = self._show_adapters
        self.adapters.on_lost = self._fail_adapter
        self.pool = engines
        self.control: EngineControl
        """What starts and ends engines; set when it runs."""
        self.cache: CacheWatch
        """How the prefix cache was used; set when it is known who counts."""
        self.upstreams: Forwarding | None = None
        """What passes requests on to other servers, if there are any."""
        self.health_of_engines: Callable[[], Health] = engines.health
        self.explain: Explain = lambda request_id, tenant: None
        """Set when the accountant's store is known."""
        self.withheld: Withheld | None = None
        """Why readiness is withheld, while it is (`web/cli/self_check.py`)."""
        self._accountant = accountant
        self._detokenizer = detokenizer
        self.render_metrics = metrics
        self._trouble = trouble
        self.actor_restarts: Callable[[], Mapping[str, int]] = dict
        self._max_open_requests = max_open_requests
        self._open: dict[str, OpenRequest] = {}
        self._encoder = encoder
        self._questions = PromptQuestions(encoder, sequences.lookups, self._check_room)
        self.is_draining = False
        self._idle = trio.Event()
        self._idle.set()

    # ------------------------------------------------------------ for handlers

    def new_request_id(self) -> str:
        return f"req-{secrets.token_hex(12)}"

    def open(
        self,
        request: Encode | Forward,
        endpoint: str,
        caller: Caller = ANONYMOUS,
        keep: KeepAnswer | None = None,
        /,
    ) -> OpenRequest:
        if self.is_draining:
            raise DeskClosed("The server is shutting down.")
        if isinstance(request, Encode) and (health := self.health_of_engines()).state is State.FAILED:
            raise DeskClosed(f"The engine has failed: {health.detail}")
        adapter = request.adapter if isinstance(request, Encode) else ""
        if adapter and not self.adapters.may_use(adapter):
            raise DeskClosed("The adapter was unloaded while this request arrived.")
        self._check_room()
        opened = self._open[request.request_id] = OpenRequest(
            request.request_id, self, request, adapter=adapter, is_batch=caller.batch_id is not None
        )
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        seed, kind = None, SequenceKind.GENERATE
        if isinstance(request, Encode):
            kind = request.kind
            seed = recorded_seed(request.sampling.seed) if kind is SequenceKind.GENERATE else None
        now = trio.current_time()
        account = OpenAccount(request.request_id, endpoint, now, opened.mailbox, caller, seed, kind, keep)
        self._accountant.post(account)
        return opened

    def _check_room(self) -> None:
        if (num_open := len(self._open) + self._questions.num_open) >= self._max_open_requests:
            raise DeskClosed(f"Too many requests are open ({num_open}). Please try again later.")

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        return await self._questions.count_tokens(prompt, prompt_param, tenant)

    async def read_prompt(
        self,
        prompt: Prompt,
        prompt_param: str,
        tenant: str = "",
        /,
        *,
        special: bool = True,
        with_text: bool = False,
        with_names: bool = False,
        truncation: Truncation | None = None,
    ) -> PromptRead:
        return await self._questions.read_prompt(
            lambda outlet: ReadPrompt(prompt, prompt_param, outlet, tenant, special, with_text, with_names, truncation)
        )

    async def look_up(self, request: Encode, /, *, prefetch: bool = False) -> Sequence[PromptLookUp]:
        return await self._questions.look_up(request, prefetch=prefetch)

    # ------------------------------------------------------------ for open requests

    async def encode(self, opened: OpenRequest, /) -> None:
        """Send a request to the tokenizer; return without having sent it if it leaves or fails while it waits."""
        if opened.stopped:
            return
        opened.is_encoding = True
        with trio.CancelScope() as scope:
            opened.when_stopped(scope.cancel)
            try:
                await self._encoder.send(opened)
                opened.on_stopped = None
            except BaseException:
                opened.mark_encoded()
                raise

    def fail(self, request_id: str, error: RequestError) -> None:
        """Fail a request unless it has ended."""
        self._accountant.post(Refused(request_id, error))

    def leave(self, request_id: str) -> None:
        """Release a request whose scope has ended."""
        if (request := self._open.pop(request_id, None)) is None:
            return
        self._stop(request)
        if not request.is_encoding:
            request.mark_encoded()
        self._accountant.post(Left(request_id, tuple(request.submitted_ids)))
        if not self._open:
            self._idle.set()
        if request.adapter:
            self.sequences.note_released()

    def reset_prefix_cache(self) -> None:
        self.sequences.post(ResetPrefixCache())

    def health(self) -> Health:
        health = attrs.evolve(self.health_of_engines(), actor_restarts=self.actor_restarts())
        upstreams, starting = self.upstreams, (State.STARTING, State.RESTARTING)
        if health.state in starting and upstreams is not None and upstreams.pool.stands_in(self.info.shared):
            detail = f"upstreams serve while no engine is ready: {health.detail}"
            health = attrs.evolve(health, state=State.READY, detail=detail)
        if health.state is not State.READY:
            return health
        if self.is_draining:
            return attrs.evolve(health, state=State.DRAINING, detail="the server is shutting down")
        if (withheld := self.withheld) is not None:
            return attrs.evolve(health, state=withheld.state, detail=withheld.detail)
        if (trouble := self._trouble()) is not None:
            return attrs.evolve(health, state=State.REFUSING, detail=trouble)
        return health

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    @property
    def num_live_sequences(self) -> int:
        return self.sequences.num_live_sequences

    def num_usable_blocks_of(self, engine_id: int) -> int:
        """Return the blocks of an engine's KV cache without the null block; 0 until configured or reported."""
        return (self.pool[engine_id].num_blocks if engine_id in self.pool else 0) or (self.info.num_blocks or 1) - 1

    # ------------------------------------------------------------ for operators

    def engines(self) -> tuple[EngineStatus, ...]:
        return tuple(engine.status() for engine in self.pool)

    # ------------------------------------------------------------ adapters

    def _uses_adapter(self, digest: str) -> bool:
        return any(opened.adapter == digest for opened in self._open.values()) or self.sequences.has_adapter(digest)

    def _show_adapters(self) -> None:
        self.info = attrs.evolve(self.info, adapters=self.adapters.served())

    def _fail_adapter(self, digest: str, reason: str) -> None:
        ids = [opened.request_id for opened in self._open.values() if opened.adapter == digest]
        self.fail_requests(f"The adapter of this request cannot be loaded any more: {reason}", ids)

    # ------------------------------------------------------------ for the tokenizer

    async def submit(self, submit: Submit, track: Track, request: OpenRequest) -> bool:
        """Send one sequence to the engine; return False if its request has left or failed."""
        if not await self.sequences.submit(submit, request):
            return False
        self._detokenizer.post(track)
        return True

    # ------------------------------------------------------------ for the accountant

    def stop(self, request_id: str) -> tuple[int, ...]:
        """Submit nothing more of a request, abort its sequences, and return which were submitted.

        Returns nothing for a request that has left, since its `Left` message has them.
        """
        if (request := self._open.get(request_id)) is None:
            return ()
        self._stop(request)
        return tuple(request.submitted_ids)

    def _stop(self, request: OpenRequest) -> None:
        request.mark_stopped()
        for sequence_id in request.submitted_ids:
            self.sequences.abort(sequence_id)
        if request.num_to_come:
            request.num_to_come = request.tokens_to_come = 0
            self.sequences.post(Abort(request.group_id, ends_group=True))
        if request.submitted_ids:
            self._detokenizer.post(Forget(tuple(request.submitted_ids)))

    def abandon(self, sequence_ids: Sequence[int]) -> None:
        """Stop waiting for sequences whose reports were lost; tokens that have not arrived are lost too."""
        for sequence_id in sequence_ids:
            self.sequences.abort(sequence_id)
        self._detokenizer.post(Forget(tuple(sequence_ids)))

    # ------------------------------------------------------------ the end

    def fail_requests(self, reason: str, request_ids: Iterable[str] | None = None) -> None:
        """Fail requests that no engine will complete: the given ones, or all that are open."""
        error = RequestError(ErrorKind.OVERLOADED, reason)
        for request_id in self._open if request_ids is None else request_ids:
            opened = self._open.get(request_id)
            # a line of a batch is run again, so that what this attempt has done must not be billed
            fault = Fault.RECOVERED if opened is not None and opened.is_batch else None
            self._accountant.post(Refused(request_id, error, fault))

    async def drain(self, grace_s: float) -> None:
        """Open no more requests, wait `grace_s` seconds for the open ones, then fail the rest."""
        self.is_draining = True
        with trio.move_on_after(grace_s):
            await self._idle.wait()
        self.fail_requests("The server shut down before this request was complete.")
        with trio.move_on_after(FINAL_RECORDS_S):
            await self._idle.wait()
