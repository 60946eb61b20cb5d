"""How many deaths of an actor end the server, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog.testing
import trio

from quipu.actors.restarts import MAX_SUSPECTS, ActorGivenUp, Deaths


class Actor:
    """An actor whose deaths are recorded; three in a row within ten seconds are too many."""

    def __init__(self) -> None:
        self.num_handled = 0
        self.counted: list[str] = []
        self.deaths = Deaths(
            "scribe", max_restarts=2, window_s=10.0, progress=lambda: self.num_handled, count=self.counted.append
        )

    def dies(self, request_id: str | None = None, times: int = 1) -> None:
        for _ in range(times):
            self.deaths.record(ValueError("why"), request_id)


@pytest.fixture
def actor() -> Iterator[Actor]:
    with structlog.testing.capture_logs():
        yield Actor()


async def test_too_many_deaths(actor: Actor, autojump_clock: trio.abc.Clock) -> None:
    """More deaths than allowed without any work between them end the server; each is counted."""
    actor.dies(times=2)
    with pytest.raises(ActorGivenUp, match="the scribe died 3 times in 10 seconds without doing any work") as caught:
        actor.dies()
    assert isinstance(caught.value.__cause__, ValueError)
    assert actor.counted == ["scribe"] * 3 and actor.deaths.num_restarts == 3


async def test_deaths_before_the_window_do_not_count(actor: Actor, autojump_clock: trio.abc.Clock) -> None:
    """An actor that dies rarely is restarted, even if it does nothing else."""
    for _ in range(5):
        actor.dies(times=2)
        await trio.sleep(11)
    assert actor.counted == ["scribe"] * 10


async def test_deaths_before_progress_do_not_count(actor: Actor, autojump_clock: trio.abc.Clock) -> None:
    """An actor that handles something between its deaths is restarted."""
    for _ in range(5):
        actor.dies(times=2)
        actor.num_handled += 1
    actor.dies(times=2)
    with pytest.raises(ActorGivenUp):
        actor.dies()


async def test_requests_to_blame(actor: Actor, autojump_clock: trio.abc.Clock) -> None:
    """Requests that each kill the actor twice never end the server, in any order; they do not hide other deaths."""
    for number in range(2 * MAX_SUSPECTS):
        actor.dies(f"r{number}")
        actor.dies(f"s{number}")
        actor.dies(f"r{number}")
        actor.dies(f"s{number}")
    actor.dies(times=2)
    actor.dies("another")
    with pytest.raises(ActorGivenUp):
        actor.dies()


async def test_request_that_cannot_be_refused(actor: Actor, autojump_clock: trio.abc.Clock) -> None:
    """Deaths that go on although their request was refused count like others."""
    actor.dies("r", times=4)
    with pytest.raises(ActorGivenUp):
        actor.dies("r")
