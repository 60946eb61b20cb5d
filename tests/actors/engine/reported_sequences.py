"""The sequences submitted to an engine, with their accounts, as the web process learns of them from reports.

Used by `engine_bench.py`, which drives the engine: before the scheduler handles a result, the entries that must follow
from it are noted, and each report is checked against them.
"""

from __future__ import annotations

from collections import deque

import attrs

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Admission, Ended, FirstToken, Pinned, Span, Written
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import Completed, Side, StepReport
from quipu.actors.messages.counts import shown
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.outcomes import ErrorKind, FinishReason
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation


@attrs.define(eq=False)
class Submission:
    """One submitted sequence, as its client sees it."""

    id: int
    account: Account
    domain: str
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = attrs.field(factory=list)
    reason: str | None = None
    aborted: bool = False
    terminal: bool = False
    error: str | None = None
    num_preempted: int = 0
    admissions: list[int] = attrs.field(factory=list)
    """Tokens reused at each admission whose step is done."""

    @property
    def cached(self) -> int | None:
        """The cached count reported to its client; None while it is unknown."""
        return shown(self.account.cached) if self.account.admitted_prompts else None

    @property
    def written(self) -> int | None:
        return shown(self.account.cache_write)


@attrs.frozen
class SentPlan:
    plan: StepPlan
    reused: dict[int, int]


class ReportedSequences:
    def __init__(self, limits: SchedulerConfig, dials: Dials) -> None:
        self.limits = limits
        self.dials = dials
        self.reports: list[StepReport] = []
        self.submissions: dict[int, Submission] = {}
        self.accounts: list[Account] = []
        self.num_withdrawn = 0
        self.num_copied = 0
        self.num_advanced_further = 0
        """Rows that yielded several tokens in a step."""
        self.refused: set[int] = set()
        """Sequences refused at once because they can never run."""
        self._sent: deque[SentPlan] = deque()
        """Plans whose results have not been handled."""
        self._spans: list[tuple[int, int, int]] = []
        """The spans that the next report must book, from the results handled."""
        self._drafts: list[tuple[int, int, int, int, bool]] = []
        """The drafts that it must book: sequence, first position, end of what was accepted and of what was rejected."""
        self._suspects: set[int] = set()  # in a step that failed
        self._failing: set[int] = set()  # alone in a step that failed, and suspected before
        self._expected_tokens: dict[int, list[int]] = {}

    def _expect(self, result: StepResult) -> None:
        """Note what must follow from a result, before the batcher handles it."""
        sent = self._sent.popleft()
        plan = sent.plan
        assert plan.step == result.step, "results must arrive in the order of their plans"
        match result:
            case StepDone():
                copied = dict(zip(result.read_ids, result.copied_tokens, strict=False))
                self._expect_advances(plan, result)
                for sequence_id, start, count in zip(
                    plan.row_ids[plan.num_going_on :], plan.chunk_starts, plan.chunk_counts, strict=True
                ):
                    self._spans.append((sequence_id, start + copied.get(sequence_id, 0), start + count))
                for admit in plan.admitted:
                    self.submissions[admit.sequence_id].admissions.append(sent.reused[admit.sequence_id])
            case StepFailed():
                if len(plan.row_ids) == 1:
                    self._failing.update(self._suspects.intersection(plan.row_ids))
                self._suspects.update(plan.row_ids)
            case StepDropped():
                self.num_withdrawn += len(plan.admitted)

    def _expect_advances(self, plan: StepPlan, done: StepDone) -> None:
        """Check how far rows advanced, and note the spans that must be booked."""
        counts = done.num_tokens or [1] * len(done.row_ids)
        for row, end in zip(done.draft_rows, done.draft_ends, strict=True):
            start, kept = done.row_starts[row] + 1, max(done.row_starts[row] + 1, done.row_ends[row])
            assert start <= kept <= end < start + plan.most_positions_of(row), (
                "more was accepted than drafted, or drafted than may"
            )
            self._drafts.append((done.row_ids[row], start, kept, end, row in done.predicted_rows))
        for row, sequence_id in enumerate(plan.row_ids[: plan.num_going_on]):
            advanced = done.row_ends[row] - done.row_starts[row]
            assert 1 <= advanced <= plan.most_positions_of(row)
            assert counts[row] in (advanced, 0), "a decoding row advances one position for each token"
            self.num_advanced_further += advanced > 1
            self._spans.append((sequence_id, done.row_starts[row], done.row_ends[row]))

    def _hear_report(self, report: StepReport) -> None:
        self.reports.append(report)
        self._check_not_ended(report)
        for sequence_id, number, reused, read, copyable, copied in zip(
            report.admitted_ids,
            report.admitted_number,
            report.admitted_reused,
            report.admitted_read,
            report.admitted_copyable,
            report.admitted_copied,
            strict=True,
        ):
            submission = self.submissions[sequence_id]
            assert reused == read
            assert reused % self.limits.block_size == 0
            assert reused == submission.admissions[number - 1]
            assert number == submission.account.sequences[sequence_id].num_admissions.get(Side.PREFILL, 0) + 1, (
                "admissions must be numbered without gaps"
            )
            assert copied == copyable, "the executor must copy every block that it is offered"
            self.num_copied += copied > 0
            admission = Admission(
                number=number,
                reused=reused,
                read=read,
                copyable=copyable,
                copied=copied,
                miss=None,
                incarnation=1,
                at=0.0,
            )
            submission.account.apply(sequence_id, admission)
        spans = list(zip(report.span_ids, report.span_starts, report.span_ends, strict=True))
        assert spans == self._spans, "the reports must book exactly the rows that ran"
        self._spans = []
        for sequence_id, start, end in spans:
            assert self.submissions[sequence_id].admissions, "a span is booked before its admission"
            self.submissions[sequence_id].account.apply(sequence_id, Span(start, end))
        drafts = list(
            zip(
                report.draft_ids,
                report.draft_starts,
                report.draft_kept,
                report.draft_ends,
                report.draft_predicted,
                strict=True,
            )
        )
        assert drafts == self._drafts, "the reports must book exactly the drafts that were verified"
        self._drafts = []
        for sequence_id, start, kept, end, is_predicted in drafts:
            drafted = self.submissions[sequence_id].account.sequences[sequence_id].drafted
            drafted.add(start, kept, end, is_predicted=is_predicted)
        for sequence_id, start, end in zip(report.written_ids, report.written_starts, report.written_ends, strict=True):
            assert start % self.limits.block_size == end % self.limits.block_size == 0
            assert end <= len(self.submissions[sequence_id].prompt)
            self.submissions[sequence_id].account.apply(sequence_id, Written(start, end))
        for sequence_id, end in zip(report.pinned_ids, report.pinned_ends, strict=True):
            assert end <= len(self.submissions[sequence_id].prompt)
            self.submissions[sequence_id].account.apply(sequence_id, Pinned(end))
        for sequence_id, token_id in zip(report.token_sequence_ids, report.token_ids, strict=True):
            submission = self.submissions[sequence_id]
            assert submission.reason is None, "a token after the last"
            assert not submission.aborted
            if not submission.tokens:
                submission.account.apply(sequence_id, FirstToken(0.0))
            submission.tokens.append(token_id)
        for sequence_id, reason in zip(report.ended_ids, report.ended_reasons, strict=True):
            submission = self.submissions[sequence_id]
            assert submission.reason is None
            submission.reason = reason
            submission.account.complete(Completed("", sequence_id, len(submission.tokens), FinishReason(reason)))
        for sequence_id, error, kind in zip(
            report.terminal_ids, report.terminal_errors, report.terminal_error_kinds, strict=True
        ):
            submission = self.submissions[sequence_id]
            assert not submission.terminal, "a second Terminal"
            submission.terminal, submission.error = True, error
            submission.account.apply(sequence_id, Ended())
            if error is not None and kind == ErrorKind.INVALID:
                self.refused.add(sequence_id)
            elif error is not None:
                assert sequence_id in self._failing, "a sequence failed that did not fail alone in a retried step"

    def _check_not_ended(self, report: StepReport) -> None:
        groups = (
            report.admitted_ids,
            report.span_ids,
            report.draft_ids,
            report.written_ids,
            report.pinned_ids,
            report.token_sequence_ids,
        )
        for ids in groups:
            assert not any(self.submissions[i].terminal for i in ids), "something is reported after a Terminal"

    def expected_tokens(self, submission: Submission) -> list[int]:
        """Return the tokens of `submission` in an engine of its own that never fails."""
        if submission.id not in self._expected_tokens:
            sampling = submission.sampling
            tokens = continuation(submission.prompt, sampling.max_tokens, self.dials, sampling.seed)
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.limits.eos_token_ids)}
            length = next((at for at, token_id in enumerate(tokens, 1) if token_id in ends), len(tokens))
            self._expected_tokens[submission.id] = tokens[:length]
        return self._expected_tokens[submission.id]

    def check_tokens_so_far(self) -> None:
        for submission in self.submissions.values():
            assert submission.tokens == self.expected_tokens(submission)[: len(submission.tokens)]

    def check_all_that_fit_finish(self) -> None:
        """Check that only sequences that do not fit into an empty engine are refused, and that all others get all their
        tokens, unless their clients left or one of their steps failed."""
        limits = self.limits
        for submission in self.submissions.values():
            length = len(submission.prompt) + submission.sampling.max_tokens
            fits = length <= min(limits.max_model_len, (limits.num_blocks - 1) * limits.block_size)
            assert submission.terminal, "the sequence never ends"
            if submission.error is None and not submission.aborted:
                assert submission.reason is not None
                assert submission.tokens == self.expected_tokens(submission)
            assert (submission.id in self.refused) == (not fits), "the wrong sequence was refused"

    def _check_account(self, account: Account) -> None:
        assert account.problems() == []
        for book in account.sequences.values():
            submission = self.submissions[book.sequence_id]
            assert book.num_admissions.get(Side.PREFILL, 0) == len(submission.admissions)
            if submission.admissions:
                assert book.admissions[0].reused == book.read == submission.admissions[0]
                assert book.read <= len(submission.prompt) - 1
                assert self.limits.enable_prefix_caching or book.read == 0
            covered = book.read + book.computed_first + book.restored_first
            assert covered == len(submission.prompt) if submission.reason else covered <= len(submission.prompt)
            if len(submission.admissions) <= 1:
                spared = self.limits.block_size - 1
                assert book.restored_first in (0, spared)
                if book.restored_first:
                    assert len(submission.prompt) == book.read + self.limits.block_size, (
                        "only a full last block may be copied"
                    )
        first = min(account.sequences.values(), key=lambda book: book.choice_index)
        prompt = account.prompts[0]
        assert shown(prompt.cached) == (self.submissions[first.sequence_id].admissions or [None])[0]
        written = prompt.cache_write_tokens
        assert written % self.limits.block_size == 0
        assert (shown(prompt.cached) or 0) + written <= prompt.num_prompt_tokens
        assert 0 <= sum(prompt.created.values()) <= written
