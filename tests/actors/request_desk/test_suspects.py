"""The search for the request that kills engines."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.request_desk.suspects import Suspects


def names(count: int) -> list[str]:
    return [f"req-{number}" for number in range(count)]


def test_first_death_blames_nobody() -> None:
    """After a first death everything is resumed, and requests that make progress are cleared."""
    suspects = Suspects()
    assert suspects.on_death(["a", "b"]).resumed == ["a", "b"]
    assert not suspects.is_searching and suspects.is_active
    suspects.on_progress(["a", "b"])
    assert not suspects.is_active
    verdict = suspects.on_death(["a", "b"])
    assert (verdict.resumed, verdict.culprit) == (["a", "b"], None) and not suspects.is_searching


def test_alone() -> None:
    """A request that was alone when two engines died in a row is tried, and is the culprit after two more deaths;
    after progress it is not."""
    suspects = Suspects()
    for is_tried in (False, True, True):
        assert suspects.on_death(["a"]).resumed == ["a"] and suspects.is_searching is is_tried
    assert suspects.on_death(["a"]).culprit == "a"
    suspects.on_death(["b"])
    suspects.on_progress(["b"])
    assert suspects.on_death(["b"]).culprit is None


def test_step_of_others() -> None:
    """Deaths in steps of others count little: a request that waited through three of them is not tried."""
    suspects = Suspects()
    for _ in range(3):
        verdict = suspects.on_death(["a", "b", "waits"], {"a", "b"})
        assert len(verdict.resumed) == 3 and not suspects.is_searching
        suspects.on_progress(["a", "b"])
    suspects.on_death(["a", "b", "waits"], {"a", "b"})
    assert suspects.is_searching, "it must be tried in the end: it may kill engines outside its steps"
    assert suspects.may_run("a") and suspects.may_run("waits") and not suspects.may_run("new")


def test_suspects_of_both_steps_are_tried_first() -> None:
    """Requests that were in both steps are tried first, then the others without progress."""
    suspects = Suspects()
    suspects.on_death(names(5), {"req-3", "req-4"})
    assert suspects.on_death(names(5), {"req-2", "req-3"}).resumed == ["req-3"]
    suspects.on_progress(["req-3"])
    assert [name for name in names(5) if suspects.may_run(name)] == ["req-0", "req-1", "req-2", "req-3", "req-4"]
    assert suspects.is_searching


def test_trial_during_steps_of_others() -> None:
    """A death in a step of others counts half against the request that is tried."""
    suspects = Suspects()
    for _ in range(2):
        suspects.on_death(["a", "b"], {"a", "b"})
    suspects.on_progress(["a"])
    for _ in range(3):
        verdict = suspects.on_death(["a", "b"], {"a"})
        assert verdict.culprit is None and "b" in verdict.resumed and suspects.is_searching
        suspects.on_progress(["a"])
    assert suspects.on_death(["a", "b"], {"a"}).culprit == "b"


def test_newcomer_is_a_suspect_too() -> None:
    """A request that came after the first death is not protected by an older one without progress."""
    suspects = Suspects()
    suspects.on_death(["old"])
    verdict = suspects.on_death(["old", "new"])
    assert verdict.culprit is None and verdict.resumed == ["old"]
    assert not suspects.may_run("new") and not suspects.may_run("other")
    suspects.on_progress(["old"])
    assert suspects.may_run("new") and not suspects.may_run("other")
    assert suspects.on_death(["old", "new"]).culprit is None
    suspects.on_progress(["old"])
    assert suspects.on_death(["old", "new"]).culprit == "new"
    assert suspects.may_run("other")


def test_engine_that_held_nothing() -> None:
    """An engine that dies while it loads changes nothing about a search."""
    suspects = Suspects()
    suspects.on_death(names(4))
    suspects.on_death(names(4))
    assert suspects.on_death([]).resumed == []
    assert [name for name in names(4) if suspects.may_run(name)] == names(2)


def test_requests_that_end_during_a_search() -> None:
    """A trial is over when its requests have ended; nothing about them is kept."""
    suspects = Suspects()
    suspects.on_death(names(4))
    suspects.on_death(names(4))
    suspects.on_end("req-3")
    suspects.on_end("req-0")
    assert not suspects.may_run("req-2")
    suspects.on_end("req-1")
    assert suspects.may_run("req-2") and suspects.is_searching
    suspects.on_end("req-2")
    assert not suspects.is_searching and not suspects.is_active and suspects.may_run("any")


@given(st.integers(1, 100), st.data())
def test_every_killer_is_found_and_nobody_else(count: int, data: st.DataObject) -> None:
    """Engines die whenever a killer runs. All others make progress in between; the search ends within its bound."""
    everyone = names(count)
    killers = set(data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=3, unique=True), "killers"))
    num_killers, num_deaths = len(killers), 0
    suspects, found = Suspects(), []
    live = list(everyone)
    while live and num_deaths < 1000:
        running = [name for name in live if suspects.may_run(name)]
        assert running, "some request must run"
        if killers.intersection(running):
            lucky = data.draw(st.booleans(), "others make progress before the engine dies")
            if lucky:
                suspects.on_progress([name for name in running if name not in killers])
            num_deaths += 1
            in_step = None
            if data.draw(st.booleans(), "the step is known"):
                innocent = data.draw(st.sets(st.sampled_from(running)), "others in the step")
                in_step = innocent | killers.intersection(running)
            culprit = suspects.on_death(running, in_step).culprit
            if culprit is not None:
                found.append(culprit)
                killers.discard(culprit)
                live.remove(culprit)
        else:
            suspects.on_progress(running)
            done = data.draw(st.sampled_from(running), "ends")
            suspects.on_end(done)
            live.remove(done)
            if not killers:
                break
    assert not killers and len(found) == num_killers
    if num_killers == 1:
        assert num_deaths <= 2 + math.log2(count) + 2


@given(st.integers(1, 100), st.integers(0, 99), st.data())
def test_killer_outside_steps_is_found(count: int, killer: int, data: st.DataObject) -> None:
    """A request that kills engines in steps of others, whether these make progress or not, is found within a bound."""
    everyone = names(count)
    bad = everyone[killer % count]
    suspects, num_deaths, culprit = Suspects(), 0, None
    while culprit is None:
        running = [name for name in everyone if suspects.may_run(name)]
        innocent = [name for name in running if name != bad]
        if bad in running:
            num_deaths += 1
            assert num_deaths <= 4 + 4 + 4 + math.log2(count) + 1
            in_step = data.draw(st.sets(st.sampled_from(innocent), min_size=1), "step") if innocent else None
            culprit = suspects.on_death(running, in_step).culprit
            if in_step and data.draw(st.booleans(), "they make progress"):
                suspects.on_progress(in_step)
        else:
            suspects.on_progress(running)
    assert culprit == bad
