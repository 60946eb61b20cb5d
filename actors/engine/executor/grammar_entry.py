"""One grammar of one tenant: the process that follows it, and its sequences.

`grammars.py` keeps the entries, and calls `compile` in one thread, `ask` and `masks` in another. If the process is
lost, the sequence that it was working on fails, and a new process follows the others from their beginning.

What must always hold: every sequence that was asked for gets a mask or a reason why there is none; a grammar that has
killed `MAX_DEATHS` processes gets no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import attrs

from ...fleet.forks.fork_server import ForkServer
from ...messages.scheduler import GRAMMAR_LOST
from .grammar_follower import GrammarFollower
from .mask_rows import RowAsk
from .sequence_grammar import ForcedTokens, SequenceGrammar

MAX_DEATHS = 2
"""Number of processes that a grammar may kill; after that, none of its sequences is followed."""
MAX_LOSSES = 3
"""Number of processes in a row that other causes, such as a lack of memory, may kill; then a step gives up on masks."""

Mask = bytes | str
"""A mask, or the reason why there is none."""

_NOTHING: Mask = b"\0"
"""Allows no token: what is drawn after a draft that may not be looked at is not kept."""

Key = tuple[str, str]
"""The owner, whose sequences share a grammar's process, and the grammar's text."""

GetServer = Callable[[], ForkServer]
"""Returns the running process that forks, or starts one. Raises OSError."""


NO_TOKENIZER = "This engine has no tokenizer to follow a grammar with."


class NoTokenizer(Exception):
    """The library cannot follow outputs of this model's tokenizer."""


class MaskLimits:
    """Limits on the CPU time for one mask, by tenant."""

    FULL_S = 0.1
    LEAST_S = 0.02
    """Twice the time that the library's own limits allow to nearly every grammar."""
    RECOVERY_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, tuple[float, float]] = {}
        """For tenants whose processes had to be killed: the limit, and the time of the last kill."""

    def of(self, tenant: str) -> float:
        limit_s, ended_s = self._ended.get(tenant, (self.FULL_S, 0.0))
        if tenant in self._ended and self._clock() - ended_s > self.RECOVERY_S:
            del self._ended[tenant]
            return self.FULL_S
        return limit_s

    def lower(self, tenant: str) -> None:
        """Halve a tenant's limit until a minute after the last call."""
        now_s = self._clock()
        self._ended = {name: one for name, one in self._ended.items() if now_s - one[1] <= self.RECOVERY_S}
        self._ended[tenant] = (max(self.LEAST_S, self.of(tenant) / 2), now_s)


@attrs.define(eq=False)
class Row:
    """A sequence's progress: how far it has been followed, and by which process."""

    number: int
    entry: Entry
    process: GrammarFollower | None = None
    num_answers: int = 0
    num_sent: int = 0


@attrs.frozen
class Asked:
    """A snapshot of a sequence when its mask is requested: its answer may grow while the mask is computed."""

    row: Row
    answer: list[int]
    """Append-only."""
    num_tokens: int
    num_answers: int
    gap: int
    next_opening_id: int | None
    ends_early: bool
    drafts: list[int]
    forced: ForcedTokens

    @classmethod
    def of(cls, grammar: SequenceGrammar, row: Row, drafts: Sequence[int]) -> Asked:
        answer = grammar.answer
        opening_id = grammar.next_opening_id
        num, ends = grammar.num_answers, grammar.ends_early
        return cls(row, answer, len(answer), num, grammar.gap, opening_id, ends, list(drafts), grammar.forced)

    def tell_forced(self, forced: Mapping[int, list[int]]) -> None:
        """Tell the sequence what has to follow it, and what follows so many of its drafts."""
        runs = {num: [*self.drafts[:num], *token_ids] for num, token_ids in forced.items()}
        self.forced.tell(self.num_answers, self.num_tokens, runs)

    def from_process(self, process: GrammarFollower, *, with_drafts: bool) -> RowAsk:
        """Return the request to a process that has followed the sequence as far as the row says, and update the row."""
        row = self.row
        is_new = row.process is not process or row.num_answers != self.num_answers
        token_ids = self.answer[0 if is_new else row.num_sent : self.num_tokens]
        row.process, row.num_answers, row.num_sent = process, self.num_answers, self.num_tokens
        drafts = self.drafts if with_drafts else []
        return RowAsk(row.number, is_new, token_ids, self.gap, self.next_opening_id, self.ends_early, drafts)


class Entry:
    """A grammar, its process and its sequences."""

    def __init__(self, tenant: str, key: Key, get_server: GetServer, limits: MaskLimits, max_masks: int) -> None:
        self.tenant = tenant
        self.key = key
        self.text = key[1]
        self.ready: Future[None] = Future()
        """Done as soon as steps no longer need to wait for the grammar."""
        self.rows: set[int] = set()
        """Numbers of the sequences that are followed."""
        self.gone: list[int] = []
        """Numbers of sequences that have ended. Any thread may append."""
        self.awaited_since: float | None = None
        """When it was prepared for a sequence that has not begun yet."""
        self.num_awaited = 0
        """How many sequences it was prepared for that have not ended, begun or not."""
        self.is_turned_away = False
        """Whether too many others were waiting to be compiled."""
        self._get_server = get_server
        self._limits = limits
        self._max_masks = max_masks
        self._lock = threading.Lock()
        self._process: GrammarFollower | None = None
        self._refusal: str | None = None
        """The reason why none of its sequences can be followed."""
        self._num_deaths = 0
        self._follows_drafts = True
        self._forgotten: list[int] = []
        """Sequences that are gone, which the process has not been told yet."""
        self._asked: GrammarFollower | None = None

    def compile(self) -> None:
        """Have the grammar compiled, and wait until it is."""
        self._compiled_process()

    def refuse(self, reason: str) -> None:
        """Make every sequence fail."""
        self._refusal = reason
        self._set_ready()

    def settle(self) -> None:
        """Forget the sequences that are gone."""
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        self.rows.difference_update(gone)
        self._forgotten += gone

    def rest(self) -> None:
        """Make the process forget every sequence, since none is followed."""
        if (process := self._process) is not None and process.is_compiled:
            process.ask(self._limits.of(self.tenant), self._take_forgotten(), [])
            process.masks()

    def close(self) -> None:
        """Release the process."""
        with self._lock:
            if self._process is not None:
                self._process.let_go()
                self._process = None

    # ------------------------------------------------------------ called in the mask thread, as are `rest` and `close`

    def ask(self, rows: Sequence[Asked]) -> None:
        """Begin to compute the masks of these sequences, or to compile the grammar if it is not compiled yet."""
        self._asked = None
        process = self._launched()
        if process is not None and process.is_compiled:
            self._ask(process, rows)

    def masks(self, rows: Sequence[Asked]) -> list[list[Mask]]:
        """Wait for the requested masks of each row: of its next token, and after each of its drafts."""
        masks: list[list[Mask]] = []
        num_losses = 0
        while len(masks) < len(rows):
            process = self._compiled_process()
            left = rows[len(masks) :]
            if process is None or num_losses == MAX_LOSSES:
                return masks + [_failed(row, self._refusal or GRAMMAR_LOST) for row in left]
            if self._asked is not process:
                self._ask(process, left)
            self._asked = None
            for row, found in zip(left, process.masks(), strict=False):
                if isinstance(found, str):
                    masks.append(_failed(row, _failure(found)))
                    continue
                masks.append([*found.masks])
                if self._follows_drafts:
                    row.tell_forced(found.forced)
            if process.lost is not None and len(masks) == len(rows):
                self._release(process)  # whatever it ended of afterwards, it was not of these
            elif process.lost is not None:
                num_losses += 1
                row = rows[len(masks)]
                if self._lose(process, row) is not None:
                    masks.append(_failed(row, _failure(process.lost.reason or "")))
        return [found + [_NOTHING] * (1 + len(row.drafts) - len(found)) for row, found in zip(rows, masks, strict=True)]

    def _ask(self, process: GrammarFollower, rows: Sequence[Asked]) -> None:
        asks = [row.from_process(process, with_drafts=self._follows_drafts) for row in rows]
        process.ask(self._limits.of(self.tenant), self._take_forgotten(), asks)
        self._asked = process

    def _take_forgotten(self) -> list[int]:
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _lose(self, process: GrammarFollower, row: Asked) -> str | None:
        """Release a process that has ended while it worked on a row. Return why the row fails, if it does."""
        assert process.lost is not None
        reason = process.lost.reason
        with self._lock:
            self._process = None
        if reason is not None and row.drafts and self._follows_drafts:
            self._follows_drafts = False  # they may have been the cause, and nobody may ever draw them
            return None
        if reason is not None:
            self._limits.lower(self.tenant)
            self._num_deaths += 1
            if self._num_deaths == MAX_DEATHS:
                self.refuse(f"The grammar cannot be followed: {reason}.")
        return reason

    # ------------------------------------------------------------ called in both threads

    def _launched(self) -> GrammarFollower | None:
        """Return the process, started if there is none; None if it cannot be started."""
        with self._lock:
            if self._process is None and self._refusal is None:
                try:
                    self._process = GrammarFollower(self._get_server(), self.text, self._max_masks)
                except NoTokenizer:
                    self._refusal = NO_TOKENIZER
                except (OSError, RuntimeError, MemoryError):
                    return None  # the next sequence tries again
            return self._process

    def _compiled_process(self) -> GrammarFollower | None:
        """Return the process once it has compiled the grammar; None if it cannot."""
        compiled = None
        for _ in range(MAX_LOSSES):
            process = self._launched()
            refusal = None if process is None else process.wait_until_compiled()
            if process is None or (process.lost is None and refusal is None):
                compiled = process
                break
            reason = refusal or (None if process.lost is None else process.lost.reason)
            self._release(process)
            if reason is not None:
                self._refusal = _failure(reason)
        self._set_ready()
        return compiled

    def _release(self, process: GrammarFollower) -> None:
        """Let go of a process, which the other thread may have replaced by now."""
        with self._lock:
            process.let_go()
            if self._process is process:
                self._process = None

    def _set_ready(self) -> None:
        with self._lock:
            if self.ready.done():
                return
            self.ready.set_result(None)


def _failed(row: Asked, reason: str) -> list[Mask]:
    return [reason] * (1 + len(row.drafts))


def _failure(reason: str) -> str:
    return f"The output cannot match its grammar any more: {reason}."
