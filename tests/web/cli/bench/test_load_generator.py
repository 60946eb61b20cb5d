"""When conversations begin, how many run at once, and that no request is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from quipu.web.cli.bench.answer import Failure, Outcome, ReportedUsage
from quipu.web.cli.bench.load_generator import LoadResult, arrival_times_s, run_load
from quipu.web.cli.bench.workload import Ask, Conversation, Workload


@attrs.define
class SlowServer:
    """Answers `text N` after a second; fails the requests that a test names."""

    fails: Callable[[Ask], bool] = lambda ask: False
    asks: list[Ask] = attrs.field(factory=list)
    num_open: int = 0
    most_open: int = 0

    async def send(self, ask: Ask) -> Outcome:
        self.asks.append(ask)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        started_s = trio.current_time()
        await trio.sleep(1)
        self.num_open -= 1
        now_s = trio.current_time()
        failure = Failure("http_500", "") if self.fails(ask) else None
        text = f"text {len(self.asks)}"
        return Outcome(started_s, now_s, (now_s,), text, ReportedUsage(), failure, True)


def workload_of(num: int, num_turns: int) -> Workload:
    def open_conversation(place: int) -> Conversation:
        def make_ask(answers: Sequence[str]) -> Ask:
            return Ask({"place": place, "answers": list(answers)})

        return Conversation(num_turns, make_ask)

    return Workload(num, num * num_turns, open_conversation)


def starts_s(result: LoadResult) -> list[float]:
    return sorted(answered.outcome.started_s for answered in result.answered)


def test_all_at_once_and_constant() -> None:
    """An infinite rate starts all at once; infinite burstiness makes all gaps equal."""
    assert arrival_times_s(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times_s(4, 2.0, math.inf, 0) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_poisson_and_burstiness(burstiness: float, variation: float) -> None:
    """The mean gap follows from the rate; its coefficient of variation is 1 for Poisson, 1/sqrt(burstiness)
    in general."""
    times_s = arrival_times_s(20_000, 10.0, burstiness, 7)
    gaps_s = np.diff(times_s)
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05)
    assert times_s == arrival_times_s(20_000, 10.0, burstiness, 7)
    assert times_s != arrival_times_s(20_000, 10.0, burstiness, 8)


async def test_conversations_begin_on_schedule(autojump_clock: trio.testing.MockClock) -> None:
    """Conversations begin as scheduled, however long answers take."""
    begin_s = trio.current_time()
    result = await run_load(workload_of(3, 1), SlowServer().send, [0.0, 0.25, 2.0])
    assert [at - begin_s for at in starts_s(result)] == pytest.approx([0.0, 0.25, 2.0])


async def test_concurrency(autojump_clock: trio.testing.MockClock) -> None:
    """No more than the limit run, and no fewer while others wait; those that wait are recorded as late."""
    server = SlowServer()
    begin_s = trio.current_time()
    result = await run_load(workload_of(7, 1), server.send, [0.0] * 7, max_concurrency=3)
    assert server.most_open == 3
    assert [at - begin_s for at in starts_s(result)] == pytest.approx([0, 0, 0, 1, 1, 1, 2])
    assert max(answered.outcome.started_s - answered.due_s for answered in result.answered) == pytest.approx(2)


async def test_turns_follow_their_answers(autojump_clock: trio.testing.MockClock) -> None:
    """A turn is sent when the previous one is answered, and contains that answer; a conversation keeps its slot."""
    server = SlowServer()
    result = await run_load(workload_of(2, 3), server.send, [0.0, 0.0], max_concurrency=1)
    assert [ask.fields["place"] for ask in server.asks] == [0, 0, 0, 1, 1, 1]
    assert server.asks[2].fields["answers"] == ["text 1", "text 2"]
    assert server.asks[3].fields["answers"] == []
    assert [(answered.conversation, answered.turn) for answered in result.answered][:3] == [(0, 0), (0, 1), (0, 2)]


async def test_failed_turn_ends_its_conversation(autojump_clock: trio.testing.MockClock) -> None:
    """Its remaining turns are counted as skipped, its slot goes to the next conversation, and progress reaches the
    total."""
    ended: list[int] = []
    server = SlowServer(fails=lambda ask: ask.fields["place"] == 0 and len(ask.fields["answers"]) == 1)
    workload = workload_of(2, 4)
    result = await run_load(workload, server.send, [0.0, 0.0], max_concurrency=1, on_ended=ended.append)
    assert len(result.answered) == 6
    assert result.num_skipped == 2
    assert sum(ended) == workload.num_asks
