"""The command of the chaotic run, for a few seconds, and its tallies."""

from __future__ import annotations

import json
import time

import attrs
import pytest

from quipu.actors.messages.counts import Known
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from tests.chaos.__main__ import main
from tests.chaos.books import engine_faults
from tests.chaos.chaotic_run import tracebacks
from tests.chaos.disturbances import Timeline
from tests.chaos.load import Tally, agree, blame, check, differences
from tests.chaos.questions import Answer, Failed, Question, Refused
from tests.chaos.vanishing_clients import MAY_BE_FEWER
from tests.e2e.servers import Process, Server


def question(**choice: object) -> Question:
    def never(*_: object) -> Answer:
        raise AssertionError

    return Question("some", never, streams=True, expected={"choices": {0: choice}})


@pytest.mark.timeout(300)
def test_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """Every part runs and finds nothing; what it leaves out is named."""
    assert main(["--quick", "--json", "--seed", "1"]) == 0, capsys.readouterr().out
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["left_out"]
    assert report["load"]["streams_finished"] > 0 and report["load"]["records"] > 0
    assert sum(report["load"]["disturbances"].values()) > 0
    before, after = report["clients"]["before"], report["clients"]["after"]
    assert after == before | {name: after[name] for name in MAY_BE_FEWER}
    assert all(after[name] <= before[name] for name in MAY_BE_FEWER)
    assert report["tokens"]["kills"] > 0


@pytest.mark.timeout(300)
def test_quick_with_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """The load and the kills find nothing with two engines per server, either; both engines have records."""
    parts = ["--parts", "load", "tokens"]
    assert main(["--quick", "--json", "--seed", "3", "--engines", "2", *parts]) == 0, capsys.readouterr().out
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["tokens"]["kills"] > 0
    assert report["load"]["servers"]["fake executor"]["by_engine"].keys() >= {"0", "1"}


def test_books_of_engines() -> None:
    """Counters of an engine that its records contradict are reported."""
    record = UsageRecord(
        request_id="r", outcome=Outcome.FINISHED, engine=1, incarnation=2, prompt=Known(40), cached=Known(32)
    )
    right = {
        "prompt_tokens_total": 40.0,
        "prefix_cache_hits_total": 32.0,
        'requests_total{outcome="finished"}': 1.0,
    }
    assert engine_faults([record], {"0": {}, "1": right}) == []
    (fault,) = engine_faults([record], {"1": right | {"prefix_cache_hits_total": 48.0}})
    assert "'1': prefix_cache_hits_total is 48" in fault
    assert len(engine_faults([record], {"0": right})) == 6, "each number is another engine's"
    assert len(engine_faults([attrs.evolve(record, router_estimate=48)], {"1": right})) == 1
    moved = attrs.evolve(record, moved_tokens=48, moved_by_engine={0: 16, 2: 32})
    received = {"0": {"moved_tokens_total": 16.0}, "1": right, "2": {"moved_tokens_total": 32.0}}
    assert engine_faults([moved], received) == []
    faults = engine_faults([moved], received | {"1": right | {"moved_tokens_total": 16.0}, "0": {}})
    assert faults == [
        "engine '0': moved_tokens_total is None, the records have 16",
        "engine '1': moved_tokens_total is 16.0, the records have 0",
    ]
    (fault,) = engine_faults([attrs.evolve(moved, moved_tokens=16)], received)
    assert "does not add up" in fault


def test_lost_and_doubled_tokens() -> None:
    """Lost and doubled tokens are counted, by id where there are ids, and reported."""
    expected = question(text="abcd", token_ids=[1, 2, 3, 4])
    tally = Tally()
    check(expected, Answer("r1", {"choices": {0: {"text": "abcd", "token_ids": [1, 2, 3, 4]}}}), tally)
    assert tally.streams_finished == 1 and not tally.problems
    check(expected, Answer("r2", {"choices": {0: {"text": "abccd", "token_ids": [1, 2, 3, 3, 4]}}}), tally)
    check(expected, Answer("r3", {"choices": {0: {"text": "abd", "token_ids": [1, 2, 4]}}}), tally)
    check(expected, Answer("r4", {"choices": {}}), tally)
    assert (tally.tokens_lost, tally.tokens_doubled, tally.answers_wrong) == (5, 1, 3)
    assert differences({"text": "ab"}, {"text": "abc"}) == (1, 0)
    assert not agree({"choices": {0: {"text": "a"}}}, {"choices": {0: {"text": "a"}, 1: {"text": "b"}}})


def test_whose_fault() -> None:
    """A full disk excuses a refusal, and a lack of memory an error that mentions it; nothing else is excused."""
    server, timeline = Server(Process, None), Timeline()
    tally, begun = Tally(), time.monotonic()
    blame(Refused("503"), question(), timeline.kinds(server, begun), tally)
    with timeline.during(server, "disk full"), timeline.during(server, "engine short of memory"):
        kinds = timeline.kinds(server, begun)
    assert timeline.kinds(server, time.monotonic() + 60) == set()
    blame(Refused("503"), question(), kinds, tally)
    blame(Failed("MemoryError"), question(), kinds, tally)
    blame(Failed("the engine died"), question(), kinds, tally)
    assert (tally.refused, tally.failed_of_shortage, tally.failed_for_others) == (1, 1, 2)


def test_tracebacks() -> None:
    """Tracebacks of any process are found, whole, except those about a lack of memory."""
    own = "Traceback (most recent call last):\n  a line\nValueError: no"
    logged = '{"event": "actor.died", "exception": "Traceback\\n"}'
    short = "Traceback (most recent call last):\n  a line\nMemoryError"
    assert tracebacks(f'{{"event": "one"}}\n{own}\n{{"event": "two"}}\n{short}\n{logged}\n') == [own, logged]
