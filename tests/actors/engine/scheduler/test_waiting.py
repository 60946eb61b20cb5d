"""The order in which waiting sequences are proposed."""

from __future__ import annotations

from quipu.actors.engine.scheduler.admission import make_sequence
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.waiting import Policy, WaitingQueue
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from tests.prompts import prompt_of


def test_choices_do_not_overtake_the_first_while_it_loads() -> None:
    """While the first choice of a prompt waits for blocks, others overtake it, but no later choice of its prompt does.

    It would find what they compute, and its client would be told that this was cached.
    """
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, "num_blocks": 100}
    config, waiting = SchedulerConfig(block_size=4, **limits), WaitingQueue(Policy.FCFS)
    prompt, other = prompt_of(9, seed=1), prompt_of(9, seed=1)
    prompts = [other, prompt, prompt, prompt, list(other)]
    sequences = [
        make_sequence(Submit(i, ids, bytes(32), [], SamplingParams(max_tokens=1)), i, config)
        for i, ids in enumerate(prompts)
    ]
    for sequence in sequences:
        waiting.push(sequence)
    waiting.set_loading(sequences[2])
    for count in range(1, 9):
        assert [s.id for s in waiting.first(count)] == [0, 1, 4][:count]
    waiting.set_loading(sequences[1])
    for count in range(1, 9):
        assert [s.id for s in waiting.first(count)] == [0, 4][:count]
    waiting.end_loading([1])
    assert [s.id for s in waiting.first(9)] == [0, 1, 4]
    waiting.remove(sequences[2])
    assert [s.id for s in waiting.first(9)] == [0, 1, 3, 4]
