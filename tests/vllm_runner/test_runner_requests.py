"""A batch in the terms of vLLM's runner: which rows continue its requests, and which are announced anew."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.kernels.vllm_runner.runner_requests import Announced, Continued, RunnerRequests, RunnerStep
from tests.kernels.step_batches import make_batch

SIZE = 4


def requests() -> RunnerRequests:
    return RunnerRequests(max_num_seqs=4, block_size=SIZE)


def row(slot: int, position: int, token_ids: list[int], blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"slot": slot, "position": position, "token_ids": token_ids, "blocks": blocks, **more}


def run(known: RunnerRequests, *rows: dict[str, Any], drawn: dict[int, int] | None = None) -> RunnerStep:
    """Run a pass in which these rows draw these tokens."""
    batch = make_batch(*({**one, "samples": at in (drawn or {})} for at, one in enumerate(rows)))
    step = known.begin(batch)
    known.collected(known.launched(batch), batch, drawn or {})
    return step


def test_prompt_then_decode() -> None:
    """A prompt is announced with its table, a decode continues it; blocks that are not needed yet are kept back."""
    known = requests()
    first = run(known, row(2, 0, [5, 6, 7], [9, 3]), drawn={0: 50})
    assert first.announced == [Announced("1", [5, 6, 7], 0, [9])] and first.continued == [] and first.ended == set()
    assert (first.request_ids, first.counts, first.positions, first.num_blocks) == (["1"], [3], [0], [1])
    second = run(known, row(2, 3, [0], [9, 3], carried=True), drawn={0: 51})
    assert second.continued == [Continued("1", 3, 1, [])] and second.announced == []
    assert second.inputs == [[50]] and second.num_blocks == [1]
    third = run(known, row(2, 4, [0], [9, 3], carried=True), drawn={0: 52})
    assert third.continued == [Continued("1", 4, 2, [3])] and third.num_blocks == [2]
    assert [step.fresh_blocks for step in (first, second, third)] == [[9], [], [3]]


def test_chunks_are_announced_one_by_one() -> None:
    """What lies before a chunk is said with placeholders, and the request of the chunk before it is ended."""
    known = requests()
    run(known, row(0, 0, [5, 6, 7, 8], [9]))
    step = run(known, row(0, 4, [15, 16], [9, 3]), drawn={0: 60})
    assert step.announced == [Announced("2", [0, 0, 0, 0, 15, 16], 4, [9, 3])] and step.ended == {"1"}
    assert run(known, row(0, 6, [0], [9, 3], carried=True)).continued == [Continued("2", 6, 1, [])]


def test_fresh_blocks() -> None:
    """Those that a row begins and does not fill: not one that it goes on in, nor one that is granted ahead."""
    known = requests()
    rows = row(0, 0, [1] * 4, [9, 3]), row(1, 3, [1] * 6, [5, 6, 7]), row(2, 5, [1] * 2, [1, 2]), row(3, 0, [1], [4])
    assert run(known, *rows).fresh_blocks == [7, 4]
    assert run(known, row(0, 4, [1] * 4, [9, 3]), row(1, 8, [1], [5, 6, 7])).fresh_blocks == [7]


def test_last_chunk_of_one_token_is_not_the_runners() -> None:
    """A row of one token whose slot has drawn nothing is announced, although it follows where the request ends."""
    known = requests()
    run(known, row(0, 0, [5, 6, 7, 8], [9]))
    step = run(known, row(0, 4, [15], [9, 3]), drawn={0: 60})
    assert [new.prompt_token_ids for new in step.announced] == [[0, 0, 0, 0, 15]]


@pytest.mark.parametrize(
    "other",
    [
        row(1, 4, [0], [9, 3], carried=True),  # a position that does not follow
        row(1, 3, [0], [8], carried=True),  # another block
        row(1, 3, [51], [9]),  # a token that the runner has not drawn
        row(1, 2, [7, 50], [9]),  # more than one token
    ],
)
def test_row_that_does_not_go_on_is_announced(other: dict[str, Any]) -> None:
    """A row continues a request only with the token that it drew last, at its end, after the same blocks."""
    known = requests()
    run(known, row(1, 0, [5, 6, 7], [9]), drawn={0: 50})
    step = run(known, other, drawn={0: 77})
    assert step.continued == [] and step.ended == {"1"}
    (new,) = step.announced
    assert new.request_id == "2" and new.num_computed == other["position"]
    assert new.prompt_token_ids[new.num_computed :] == ([50] if other.get("carried") else other["token_ids"])


def test_token_from_the_host_that_the_runner_knows() -> None:
    """A token fed by the host continues the request if it is the one that was drawn."""
    known = requests()
    run(known, row(1, 0, [5, 6, 7], [9]), drawn={0: 50})
    assert run(known, row(1, 3, [50], [9])).continued == [Continued("1", 3, 1, [])]


def test_everything_is_announced_after_a_failed_pass() -> None:
    """The requests of the pass, those beside it and those that it was to end are ended; a carried token is kept."""
    known = requests()
    run(known, row(0, 0, [5, 6], [9]), row(1, 0, [7], [8]), row(2, 0, [4], [7]), drawn={0: 50, 1: 51, 2: 52})
    failing = make_batch(row(0, 2, [0], [9], carried=True), row(1, 0, [3], [5]))
    assert known.begin(failing).ended == {"2"}
    known.forget()
    step = run(known, row(0, 2, [0], [9], carried=True), row(1, 0, [3], [5]), row(2, 1, [0], [7], carried=True))
    assert step.ended == {"1", "2", "3", "4"} and step.continued == []
    assert [new.prompt_token_ids for new in step.announced] == [[0, 0, 50], [3], [0, 52]]
    assert len({*step.request_ids, *step.ended}) == 7


def test_ended_requests_are_ended_once() -> None:
    """A message that the runner has read is not repeated."""
    known = requests()
    run(known, row(0, 0, [5], [9]))
    assert run(known, row(0, 0, [6], [9])).ended == {"1"}
    assert run(known, row(0, 0, [7], [9])).ended == {"2"}


def test_nothing_to_carry() -> None:
    """A carried row whose slot has drawn nothing is refused, and changes nothing."""
    known = requests()
    with pytest.raises(ValueError, match="carries slot 3, which has no single token"):
        known.begin(make_batch(row(0, 0, [5], [9]), row(3, 4, [0], [7, 8], carried=True)))
    assert run(known, row(0, 0, [5], [9])).request_ids == ["1"]


def test_token_that_only_the_device_knows() -> None:
    """A pass may be launched before the last one is collected: a row that goes on needs no token of it."""
    known = requests()
    batch = make_batch(row(1, 0, [5, 6, 7], [9]))
    known.begin(batch)
    first = known.launched(batch)
    decode = make_batch(row(1, 3, [0], [9], carried=True))
    assert not known.needs_tokens(decode)
    step = known.begin(decode)
    assert step.inputs == [None] and step.counts == [1] and step.continued == [Continued("1", 3, 1, [])]
    second = known.launched(decode)
    known.collected(first, batch, {0: 50})
    assert known.begin(make_batch(row(1, 4, [0], [9, 3], carried=True))).inputs == [None], "50 is not the last one"
    known.collected(second, decode, {0: 51})
    assert known.begin(make_batch(row(1, 4, [0], [9, 3], carried=True))).inputs == [[51]]


def test_announcing_a_token_that_only_the_device_knows() -> None:
    """It has to wait for the token; asking changes nothing."""
    known = requests()
    batch = make_batch(row(1, 0, [5, 6, 7], [9]), row(2, 0, [5], [8]))
    known.begin(batch)
    number = known.launched(batch)
    moved = make_batch(row(2, 1, [0], [8], carried=True), row(1, 3, [0], [4], carried=True))
    assert known.needs_tokens(moved)
    with pytest.raises(ValueError, match="not known yet"):
        known.begin(moved)
    known.collected(number, batch, {0: 50, 1: 60})
    assert not known.needs_tokens(moved)
    step = known.begin(moved)
    assert step.continued == [Continued("2", 1, 1, [])]
    assert [new.prompt_token_ids for new in step.announced] == [[0, 0, 0, 50]]


def test_failed_launch_behind_a_pass_that_runs() -> None:
    """What the running pass has drawn is known once it is collected, although everything is announced anew."""
    known = requests()
    batch = make_batch(row(1, 0, [5, 6, 7], [9]))
    known.begin(batch)
    number = known.launched(batch)
    decode = make_batch(row(1, 3, [0], [9], carried=True))
    known.begin(decode)
    known.forget()
    known.collected(number, batch, {0: 50})
    assert [new.prompt_token_ids for new in known.begin(decode).announced] == [[0, 0, 0, 50]]
