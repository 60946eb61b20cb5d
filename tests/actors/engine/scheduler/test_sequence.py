"""A sequence's position and last step do not change when it starts or stops sharing its advance with others."""

from __future__ import annotations

from quipu.actors.engine.scheduler.sequence import ALONE, Sequence, SharedAdvance
from quipu.actors.messages.sampling import SamplingParams


def make_sequence() -> Sequence:
    tokens = list(range(5))
    return Sequence(
        id=1,
        arrival=0,
        tenant="",
        priority=0,
        tokens=tokens,
        known_tokens=tokens,
        num_prompt_tokens=5,
        root_key=b"",
        keys=[],
        sampling=SamplingParams(max_tokens=9),
        stop_ids=frozenset(),
        max_len=14,
    )


def test_advancing_with_others() -> None:
    """A shared advance counts for a sequence only while it takes part, not before it joins or after it leaves."""
    sequence, first, second = make_sequence(), SharedAdvance(), SharedAdvance()
    sequence.next_start, sequence.last_step = 5, 1
    first.positions = 7
    sequence.advance_with(first)
    assert (sequence.next_start, sequence.last_step) == (5, 1)
    first.positions, first.last_step = 9, 3
    assert (sequence.next_start, sequence.last_step) == (7, 3)
    sequence.next_start -= 1
    second.positions = 20
    sequence.advance_with(second)
    first.positions, first.last_step = 11, 4
    assert (sequence.next_start, sequence.last_step) == (6, 3)
    second.positions, second.last_step = 21, 5
    sequence.advance_with(ALONE)
    second.positions, second.last_step = 22, 6
    assert (sequence.next_start, sequence.last_step) == (7, 5)
