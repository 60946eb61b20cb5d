"""Which prompt tokens a step scores, and which scores are reported."""

from __future__ import annotations

import random
from array import array

import pytest

from quipu.actors.engine.scheduler.prompt_scores import add_prompt_scoring, hand_out_scores
from quipu.actors.engine.scheduler.report_builder import ReportBuilder
from quipu.actors.engine.scheduler.sequence import Sequence
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.executor import ToScore
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scores import PackedScores, Scores, StepScores
from quipu.actors.shared.scored_tokens import pack


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


def token_ids_of(packed: PackedScores) -> list[int]:
    return list(array("I", packed.token_ids))


def answer(to_score: ToScore | None, sequence_id: int) -> StepScores:
    prompts = [] if to_score is None else [pack(scores(token_ids)) for token_ids in to_score.token_ids]
    return StepScores(
        [], scores([]), [sequence_id] * len(prompts), [] if to_score is None else to_score.positions, prompts
    )


def flush(report: ReportBuilder) -> StepReport:
    return report.flush(
        step=1, num_running=0, num_waiting=0, num_free_blocks=0, num_cached_blocks=0, num_pinned_blocks=0
    )


@pytest.mark.parametrize("seed", range(30))
def test_each_token_once_in_order(seed: int) -> None:
    """With random chunks, some void, some computed again, each token but the first is reported once, in order."""
    draw = random.Random(seed)
    sequence, report = make(1, 40, outputs=3), ReportBuilder()
    start = 0
    while start < 43:
        end = min(43, start + draw.randrange(1, 12))
        found = answer(add_prompt_scoring(None, sequence, 0, start, end), 1)
        if draw.random() < 0.3:  # preempted: the scores found so far are void
            hand_out_scores(found, [], report)
            start = 0
        else:
            hand_out_scores(found, [sequence], report)
            start = end if draw.random() < 0.8 else draw.randrange(end)
    reported = [
        (position, prompt)
        for step in flush(report).scores
        for position, prompt in zip(step.prompt_positions, step.prompts, strict=True)
    ]
    assert [token_id for _, prompt in reported for token_id in token_ids_of(prompt)] == sequence.tokens[1:40]
    position = 1
    for at, prompt in reported:
        assert at == position
        position += len(token_ids_of(prompt))


def test_two_chunks_in_flight() -> None:
    """The second chunk is planned before the first is answered, and asks for the tokens that follow it."""
    sequence = make(1, 20)
    to_score = add_prompt_scoring(add_prompt_scoring(None, sequence, 0, 0, 8), sequence, 1, 8, 20)
    assert to_score is not None
    assert to_score.rows == [0, 1] and to_score.positions == [1, 9]
    assert to_score.token_ids == [sequence.tokens[1:9], sequence.tokens[9:20]]


def test_scores_of_ended_sequences_are_void() -> None:
    """The scores of a sequence that is gone are void with its tokens; a step that leaves none reports nothing."""
    report = ReportBuilder()
    found = StepScores(
        [1, 2, 3], Scores([7, 8, 9], [-1.0, -2.0, -3.0], [1, 2, 3], [[7], [8], [9]], [[], [], []]), [], [], []
    )
    hand_out_scores(found, [make(3, 4), make(1, 4)], report)
    hand_out_scores(found, [make(5, 4)], report)
    (reported,) = flush(report).scores
    assert reported.drawn_ids == [1, 3]
    assert reported.drawn == Scores([7, 9], [-1.0, -3.0], [1, 3], [[7], [9]], [[], []])
    assert flush(report).scores == []
