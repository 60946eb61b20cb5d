"""The tokens that may come next in sequences whose output has to match a grammar.

Each grammar of a tenant is followed by its own process (`grammar_follower.py`), while the backend runs the forward
pass. A library call that does not terminate is killed by the limit on CPU time, which fails only the sequence that it
was computing. Grammars are compiled before the scheduler gets their sequences (`grammar_gate.py`).

`begin` only hands its work to a thread: writing to many processes takes longer than the backend should wait.

What must always hold: a sequence whose grammar fails reports the reason, and no other sequence fails; tenants share no
grammar process; a tenant whose processes had to be killed gets less and less time for each mask.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from ...fleet.forks.fork_server import ForkServer
from ...messages.sampling import OutputGrammar
from ...messages.scheduler import GRAMMAR_LOST
from ...shared.fair_queue import QueueFull
from ...shared.tenant_cache import TenantCache
from .grammar_entry import NO_TOKENIZER, Asked, Entry, Key, Mask, MaskLimits, NoTokenizer, Row
from .grammar_turns import GrammarTurns
from .sequence_grammar import SequenceGrammar

MODULE = "quipu.actors.engine.executor.mask_program"
MAX_KEPT = 64
"""Maximum number of grammars without sequences that are kept for later ones, each with its process."""
SETTLE_S = 10.0
"""Seconds after which the process of a grammar without sequences forgets its past ones, if no step runs."""
BLOCKED_S = 1.0
"""Seconds after which the place of a grammar that nobody waits for any more is given to another, likewise."""
_UNWANTED = "Every sequence that waited for this grammar has ended."


class MaskMaker(Protocol):
    """The part of `GrammarMasks` that the executor needs."""

    def prepare(self, grammar: OutputGrammar) -> Future[Any]: ...

    def begin(
        self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
    ) -> Callable[[], Sequence[Mask]]: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


class NoMasks:
    """Replaces `GrammarMasks` in an engine without a tokenizer."""

    def prepare(self, grammar: OutputGrammar) -> Future[Any]:
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def begin(
        self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
    ) -> Callable[[], Sequence[Mask]]:
        return lambda: [NO_TOKENIZER] * (len(grammars) + sum(map(len, drafts)))

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class GrammarMasks:
    """Compiles the grammars of one engine and computes their masks, in other processes."""

    def __init__(self, tokenizer_json: bytes, eos_token_ids: tuple[int, ...], max_masks: int = 256) -> None:
        """Processes are started when they are needed, or by `warm_up`. `max_masks`: of one step."""
        self._frames = tokenizer_json, json.dumps(eos_token_ids).encode()
        self._max_masks = max_masks
        self._server: ForkServer | None = None
        self._server_lock = threading.Lock()
        self._limits = MaskLimits()
        self._entries: dict[Key, Entry] = {}
        self._live: set[Entry] = set()
        """Entries with sequences."""
        self._idle: TenantCache[Key, Entry] = TenantCache(MAX_KEPT)
        self._turns = GrammarTurns()
        self._left: deque[Entry] = deque()
        """Entries of grammars that were prepared and are gone, with their sequences. Any thread may append."""
        self._rows: weakref.WeakKeyDictionary[SequenceGrammar, Row] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._in_order = ThreadPoolExecutor(1, thread_name_prefix="masks")
        """Runs all communication with processes that have compiled their grammar."""
        self._is_closed = False

    @property
    def server_pid(self) -> int | None:
        """The id of the forking process, if it has been started."""
        return None if self._server is None else self._server.pid

    def warm_up(self) -> None:
        """Start the thread and load the tokenizer now: later there may be no memory for either."""
        with self._changed:
            self._start_thread()

    def prepare(self, grammar: OutputGrammar) -> Future[None]:
        """Begin to compile a grammar, unless it is known, and as long as the object exists. May be called from any
        thread.
        """
        with self._changed:
            entry = self._entries.get(_key(grammar))
            if entry is not None and entry.is_turned_away:
                self._settle()
                entry = self._entries.get(_key(grammar))
            if entry is None:
                entry = self._new_entry(grammar)
                try:
                    self._turns.add(entry)
                except QueueFull:  # kept as such until they have ended: a step must not compile it
                    entry.is_turned_away = True
                    entry.refuse(GRAMMAR_LOST)
            entry.num_awaited += 1
            weakref.finalize(grammar, self._left.append, entry).atexit = False
            self._idle.get(entry.tenant, entry.key)  # marks it as most recently used
            self._start_thread()
            self._changed.notify()
            return entry.ready

    def begin(
        self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
    ) -> Callable[[], Sequence[Mask]]:
        """Begin to compute the masks of the next tokens of these sequences. The result waits for them.

        `drafts`: for each sequence, tokens that may come next; the masks after each follow that of the sequence. Empty:
        there are none.
        """
        drafts = drafts or [()] * len(grammars)
        by_entry: dict[Entry, list[Asked]] = {}
        places: dict[Entry, list[int]] = {}
        with self._changed:
            self._settle()
            for place, (grammar, draft) in enumerate(zip(grammars, drafts, strict=True)):
                if not grammar.is_reasoning:
                    row = self._rows.get(grammar) or self._begin_row(grammar)
                    by_entry.setdefault(row.entry, []).append(Asked.of(grammar, row, draft))
                    places.setdefault(row.entry, []).append(place)
        num_masks = [1 + len(draft) for draft in drafts]
        return self._in_order.submit(self._compute, by_entry, places, num_masks).result

    def close(self) -> None:
        """End every process. No step may be running."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        with self._server_lock:
            if self._server is not None:
                self._server.end()
        self._in_order.shutdown()  # the processes that the threads waited for have ended
        if self._thread is not None:
            self._thread.join()
        for entry in self._entries.values():
            entry.close()

    def _compute(
        self, by_entry: Mapping[Entry, list[Asked]], places: Mapping[Entry, list[int]], num_masks: list[int]
    ) -> list[Mask]:
        for entry, rows in by_entry.items():
            entry.ask(rows)
        masks: dict[int, list[Mask]] = {}
        for entry, rows in by_entry.items():
            masks.update(zip(places[entry], entry.masks(rows), strict=True))
        free = [] if len(masks) == len(num_masks) else [self._any_but_end()]
        return [mask for place, num in enumerate(num_masks) for mask in masks.get(place, free * num)]

    def _any_but_end(self) -> Mask:
        try:
            end_mask = np.frombuffer((self._server or self._running_server()).greeting, np.uint32)
        except (OSError, NoTokenizer):
            return NO_TOKENIZER
        return (~end_mask).tobytes()

    # ------------------------------------------------------------ entries (called with the lock held)

    def _new_entry(self, grammar: OutputGrammar | SequenceGrammar) -> Entry:
        entry = Entry(grammar.tenant, _key(grammar), self._running_server, self._limits, self._max_masks)
        self._entries[entry.key] = entry
        return entry

    def _begin_row(self, grammar: SequenceGrammar) -> Row:
        entry = self._entries.get(_key(grammar)) or self._new_entry(grammar)
        self._turns.leave(entry)
        self._idle.pop(entry.tenant, entry.key)
        self._live.add(entry)
        self._changed.notify()  # a place may be free
        row = self._rows[grammar] = Row(next(self._numbers), entry)
        entry.rows.add(row.number)
        weakref.finalize(grammar, entry.gone.append, row.number).atexit = False
        return row

    def _settle(self) -> None:
        """Keep the entries whose last sequence is gone for later ones, up to a limit."""
        while self._left:
            self._leave(self._left.popleft())
        for entry in [one for one in self._live if one.gone]:
            entry.settle()
            if not entry.rows:
                self._live.remove(entry)
                if entry.is_turned_away:
                    self._forget_unused(entry)
                    continue
                self._in_order.submit(entry.rest)
                self._keep(entry)
        for entry in self._turns.expired():
            self._keep(entry)

    def _leave(self, entry: Entry) -> None:
        """Give up the turn or the place of an entry, if this was the last of the sequences that waited for it."""
        entry.num_awaited -= 1
        if entry.num_awaited:
            return
        if self._turns.is_queued(entry):
            self._turns.leave(entry)
            entry.refuse(_UNWANTED)
            del self._entries[entry.key]
        elif self._turns.leave(entry):
            self._keep(entry)
            self._changed.notify()
        elif entry.is_turned_away:
            self._forget_unused(entry)

    def _forget_unused(self, entry: Entry) -> None:
        """Forget that there was no turn for a grammar, once that has been told to all of its sequences."""
        if not entry.rows and not entry.num_awaited:
            del self._entries[entry.key]

    def _keep(self, entry: Entry) -> None:
        pushed_out = self._idle.put(entry.tenant, entry.key, entry)
        if pushed_out is not None:
            del self._entries[pushed_out.key]
            self._in_order.submit(pushed_out.close)

    # ------------------------------------------------------------ processes

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_in_turn, name="grammars", daemon=True)
            self._thread.start()
            self._in_order.submit(bool)  # starts the executor's thread, too

    def _compile_in_turn(self) -> None:
        with suppress(OSError, NoTokenizer):
            self._running_server()
        while (entry := self._next()) is not None:
            entry.compile()

    def _next(self) -> Entry | None:
        """Wait for the next entry to compile; None if there will be no more."""
        with self._changed:
            while not self._is_closed:
                self._settle()
                if (entry := self._turns.next()) is not None:
                    return entry
                self._changed.wait(BLOCKED_S if self._turns.num_waiting else SETTLE_S if self._live else None)
            return None

    def _running_server(self) -> ForkServer:
        """Return the forking process, started if it is not running. Raises OSError and NoTokenizer."""
        with self._server_lock:
            if self._is_closed:
                raise OSError("closed")
            if self._server is None or not self._server.is_usable:
                if self._server is not None:
                    self._server.end()
                self._server = ForkServer.start(MODULE, *self._frames)
            if not self._server.greeting:
                raise NoTokenizer
            return self._server


def _key(grammar: OutputGrammar | SequenceGrammar) -> Key:
    return grammar.owner, grammar.text
