"""Changes to one sequence's logits before a token is drawn from them: bans, biases, penalties, a forced token.

The executor makes one `LogitProcessor` for each sequence that uses any of them and adds every drawn token to it; a
backend changes the rows of a step within `edited`, draws, and has the raw logits back. The order is vLLM's: bit mask,
allowed tokens, bad words, minimum of tokens, bias, then the penalties (repetition, frequency, presence). Temperature
and the filters follow in `sampling/oracle.py`. If a thinking budget forces a token (`reasoning_budget.py`), none apply.

What must always hold: an edit depends on its row, its rules and its sequence's tokens alone, not on recomputation or
chunking; the cost of a row depends on its own rules only, and is nothing without any. One client's request never fails
the step that it shares with others: a ban that would leave no token is ignored, and with a mask fails its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import attrs
import numpy as np
import numpy.typing as npt

from .logit_edits import Edit, Row
from .reasoning_budget import ReasoningBudget
from .seen_tokens import Ids, SeenTokens, distinct_ids
from .step_types import LogitRules

NONE_LEFT = "No token satisfies the request's grammar together with its other rules."

_LARGEST = float(np.finfo(np.float32).max)


def no_masks() -> Sequence[bytes | str]:
    return ()


@attrs.frozen
class Processing:
    """Rows whose logits are changed before a token is drawn from them. All of them have `samples`."""

    rows: list[int]
    """Rows of sequences with rules that can change the next token, ascending."""
    processors: list[LogitProcessor]
    masked_rows: list[int] = attrs.field(factory=list)
    """Rows with a bit mask, ascending."""
    masks: Callable[[], Sequence[bytes | str]] = no_masks
    """Waits for the mask of each of these rows, and of their draft rows, or for why it has none. A mask is
    little-endian words of 32 bits, the lowest bit first, as grammar libraries write them; a token whose bit is 0, or
    that has none, is not drawn."""
    failures: dict[int, str] = attrs.field(factory=dict, eq=False)
    """Filled in by `edited`: rows for which no token is left, and why. What is drawn for them means nothing."""


@contextmanager
def edited(
    processing: Processing | None, rows: Sequence[int], logits_MV: npt.NDArray[np.float32], *, restores: bool = True
) -> Iterator[None]:
    """Apply rules and masks to `logits_MV`, the logits of these rows, and restore the raw ones on exit.

    Waits for the masks. Rows that fail, and rows in which a rule would hide NaN or +inf, are left raw; under a mask,
    these stay or become NaN. `restores`: whether the raw logits of rows that have only a mask are read afterwards;
    keeping them costs more than the mask.
    """
    if processing is None:
        yield
        return
    with_rules = set(processing.rows)
    wanted = {*with_rules, *processing.masked_rows}
    edits = {row: Edit(logits_V) for row, logits_V in zip(rows, logits_MV, strict=True) if row in wanted}
    try:
        failures = processing.failures
        for row, mask in zip(processing.masked_rows, processing.masks(), strict=True):
            if row not in edits:
                continue  # drawn elsewhere
            if isinstance(mask, str):
                failures[row] = mask
            else:
                edits[row].mask(mask, keeps_raw=restores or row in with_rules)
        for row, processor in zip(processing.rows, processing.processors, strict=True):
            processor.apply(edits[row])
        failures |= {row: NONE_LEFT for row, edit in edits.items() if edit.is_contradictory and not edit.is_broken}
        for row, edit in edits.items():
            if row in failures or edit.is_broken:
                edit.undo()
        yield
    finally:
        for edit in edits.values():
            edit.undo()


class LogitProcessor:
    """One sequence's rules, and what they need to know of its tokens."""

    def __init__(self, rules: LogitRules, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """`output_token_ids` are those drawn so far, by this admission and earlier ones."""
        self.rules = rules
        self.outputs = list(output_token_ids)
        self._allowed = distinct_ids(rules.allowed_token_ids)
        self._held_back = distinct_ids(rules.held_back_token_ids)
        self._bias = distinct_ids(rules.bias)
        self._bias_values = np.array([rules.bias[int(token_id)] for token_id in self._bias], dtype=np.float32)
        self._always_bad = [word[0] for word in rules.bad_words if len(word) == 1]
        self._bad_after: dict[int, list[tuple[int, ...]]] = {}
        for word in rules.bad_words:
            if len(word) > 1:
                self._bad_after.setdefault(word[-2], []).append(word)
        self._budget = _budget_of(rules)
        self._only_budget = rules.thinking_budget is not None and rules.without_budget() == LogitRules()
        self._penalises = bool(rules.frequency_penalty or rules.presence_penalty or rules.repetition_penalty != 1)
        # the prompt counts for the repetition penalty only
        self._prompt_token_ids = prompt_token_ids if rules.repetition_penalty != 1 else ()
        self.seen = SeenTokens(self._prompt_token_ids)
        for token_id in output_token_ids:
            self._note(token_id)

    def __copy__(self) -> LogitProcessor:
        """Return one to which outputs can be added apart from this one."""
        other = object.__new__(LogitProcessor)
        vars(other).update(vars(self), outputs=list(self.outputs), seen=copy(self.seen), _budget=copy(self._budget))
        return other

    def add_output(self, token_id: int) -> None:
        """Record a drawn token."""
        self.outputs.append(token_id)
        self._note(token_id)

    def after(self, token_ids: Sequence[int]) -> LogitProcessor:
        """Return the processor after these tokens, which may not be kept: for a pass that draws several of one row."""
        if not token_ids:
            return self
        ahead = copy(self)
        for token_id in token_ids:
            ahead.add_output(token_id)
        return ahead

    def _note(self, token_id: int) -> None:
        if self._penalises:
            self.seen.count(token_id)
        if self._budget is not None:
            self._budget.add_output(token_id)

    @property
    def is_idle(self) -> bool:
        """Whether the next token is drawn from unchanged logits because a thinking budget, its only rule, lasts."""
        return self._only_budget and self._forced_token_id is None

    @property
    def _forced_token_id(self) -> int | None:
        return None if self._budget is None else self._budget.forced_token_id

    def bans_alone(self) -> Ids | None:
        """Return the tokens that must not be drawn next, if the rules change nothing else now; otherwise None."""
        seen, rules = self.seen, self.rules
        others = (self._allowed, self._bias, seen.prompt_ids, seen.output_ids)
        if self._forced_token_id is not None or any(map(len, others)):
            return None
        held_back = self._held_back if len(self.outputs) < rules.min_tokens else self._held_back[:0]
        return np.concatenate((self._bad_now(), held_back)) if rules.bad_words else held_back

    def apply(self, edit: Edit) -> None:
        """Edit the row from which the next token is drawn."""
        if (forced := self._forced_token_id) is not None:
            edit.force(forced)
            return
        if len(self._allowed):
            edit.ban_all_but(self._allowed)
        bad = self._bad_now()
        if len(bad):
            edit.ban(bad)
        if len(self.outputs) < self.rules.min_tokens and len(self._held_back):
            edit.hold_back(self._held_back)
        if len(self._bias):
            edit.put(self._bias, edit.logits_V[self._bias] + self._bias_values)
        if len(self.seen.prompt_ids):
            edit.put(self.seen.prompt_ids, self._repeated(edit.logits_V[self.seen.prompt_ids]))
        if len(self.seen.output_ids):
            edit.put(self.seen.output_ids, self._penalised(edit.logits_V[self.seen.output_ids]))

    def _bad_now(self) -> Ids:
        """Return the tokens that would complete a bad word."""
        last = self.outputs[-1] if self.outputs else None
        words = self._bad_after.get(last, ()) if last is not None else ()
        completing = [word[-1] for word in words if tuple(self.outputs[1 - len(word) :]) == word[:-1]]
        return distinct_ids(self._always_bad + completing)

    def _repeated(self, logits_T: Row) -> Row:
        """Apply the repetition penalty, as in CTRL (Keskar et al. 2019)."""
        penalty, wide_T = self.rules.repetition_penalty, logits_T.astype(np.float64)
        with np.errstate(over="ignore"):  # by a penalty of 1e-310, say
            return _bounded(np.where(wide_T > 0, wide_T / penalty, wide_T * penalty), logits_T)

    def _penalised(self, logits_O: Row) -> Row:
        """Apply all penalties to logits of outputs; those in the prompt have had the repetition penalty already."""
        rules, counts_O = self.rules, self.seen.counts
        if rules.repetition_penalty != 1:
            logits_O = np.where(self.seen.are_new, self._repeated(logits_O), logits_O)
        return _bounded(logits_O - (rules.frequency_penalty * counts_O + rules.presence_penalty), logits_O)


def _budget_of(rules: LogitRules) -> ReasoningBudget | None:
    if rules.thinking_budget is None:
        return None
    return ReasoningBudget(
        rules.thinking_budget,
        rules.reasoning_opening_ids,
        rules.reasoning_closing_ids,
        prompt_opens=rules.prompt_opens_reasoning,
    )


def _bounded(new_T: npt.NDArray[np.floating], old_T: Row) -> Row:
    """Keep finite logits finite: a penalty must not ban a token, and an infinity would fail the step."""
    return np.where(np.isfinite(old_T), new_T.clip(-_LARGEST, _LARGEST), old_T).astype(np.float32)
