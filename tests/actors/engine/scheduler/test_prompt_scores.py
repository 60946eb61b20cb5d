"""Which prompt tokens a step scores, and which scores are reported."""

from __future__ import annotations

import random
from array import array

import pytest

from quipu.actors.engine.scheduler.prompt_scores import add_prompt_scoring, hand_out
from quipu.actors.engine.scheduler.report_builder import ReportBuilder
from quipu.actors.engine.scheduler.sequence import Sequence
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.executor import ToScore
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scores import Scores, StepPayloads
from quipu.actors.shared.scored_tokens import ScoredColumns, pack
from quipu.actors.shared.token_decoding import TokenText


def make(sequence_id: int, length: int, *, outputs: int = 0) -> Sequence:
    tokens = list(range(100, 100 + length + outputs))
    return Sequence(
        id=sequence_id,
        arrival=0,
        tenant="",
        priority=0,
        tokens=tokens,
        known_tokens=tokens,
        num_prompt_tokens=length,
        root_key=b"",
        keys=[],
        sampling=SamplingParams(max_tokens=9, prompt_logprobs=0),
        stop_ids=frozenset(),
        max_len=length + 9,
    )


def scores(token_ids: list[int]) -> Scores:
    return Scores(token_ids, [-float(i) for i in token_ids], [1] * len(token_ids), [[]] * len(token_ids), [])


def token_ids_of(payload: bytes) -> list[int]:
    columns = ScoredColumns(lambda token_id: TokenText("", b""))
    columns.extend(payload, array("I"))
    return [token.token_id for token in columns.tokens(0, len(columns), 0)]


def answer(to_score: ToScore | None, sequence_id: int) -> StepPayloads:
    found = StepPayloads([], scores([]), [], [], [])
    asked = to_score or ToScore([], [], [])
    for position, token_ids in zip(asked.positions, asked.token_ids, strict=True):
        found.ids.append(sequence_id)
        found.ends.append(position + len(token_ids))
        found.payloads.append(pack(scores(token_ids)))
    return found


def flush(report: ReportBuilder) -> StepReport:
    return report.flush(
        step=1, num_running=0, num_waiting=0, num_free_blocks=0, num_cached_blocks=0, num_pinned_blocks=0
    )


@pytest.mark.parametrize("seed", range(30))
def test_each_token_once_in_order(seed: int) -> None:
    """With random chunks, some void and some computed again, each token but the first is reported once, in order."""
    draw = random.Random(seed)
    sequence, report = make(1, 40, outputs=3), ReportBuilder()
    start = 0
    while start < 43:
        end = min(43, start + draw.randrange(1, 12))
        found = answer(add_prompt_scoring(None, sequence, 0, start, end), 1)
        if draw.random() < 0.3:  # preempted: the scores found so far are void
            hand_out(found, [], report)
            start = 0
        else:
            hand_out(found, [sequence], report)
            start = end if draw.random() < 0.8 else draw.randrange(end)
    reported = [
        (end, token_ids_of(payload))
        for step in flush(report).payloads
        for end, payload in zip(step.ends, step.payloads, strict=True)
    ]
    assert [token_id for _, token_ids in reported for token_id in token_ids] == sequence.tokens[1:40]
    position = 1
    for end, token_ids in reported:
        position += len(token_ids)
        assert end == position


def test_two_chunks_in_flight() -> None:
    """The second chunk is planned before the first is answered, and asks for the tokens that follow it."""
    sequence = make(1, 20)
    to_score = add_prompt_scoring(add_prompt_scoring(None, sequence, 0, 0, 8), sequence, 1, 8, 20)
    assert to_score is not None
    assert to_score.rows == [0, 1] and to_score.positions == [1, 9]
    assert to_score.token_ids == [sequence.tokens[1:9], sequence.tokens[9:20]]


def test_scores_of_ended_sequences_are_void() -> None:
    """The scores of an ended sequence are void, like its tokens; a step whose scores are all void reports nothing."""
    report = ReportBuilder()
    found = StepPayloads(
        [1, 2, 3], Scores([7, 8, 9], [-1.0, -2.0, -3.0], [1, 2, 3], [[7], [8], [9]], [[], [], []]), [], [], []
    )
    hand_out(found, [make(3, 4), make(1, 4)], report)
    hand_out(found, [make(5, 4)], report)
    (reported,) = flush(report).payloads
    assert reported.drawn_ids == [1, 3]
    assert reported.drawn == Scores([7, 9], [-1.0, -3.0], [1, 3], [[7], [9]], [[], []])
    assert flush(report).payloads == []
