"""The command of the chaotic run, for a few seconds, and its tallies."""

from __future__ import annotations

import json
import time

import pytest

from tests.chaos.__main__ import main
from tests.chaos.chaotic_run import tracebacks
from tests.chaos.disturbances import Timeline
from tests.chaos.load import Tally, agree, blame, check, differences
from tests.chaos.questions import Answer, Failed, Question, Refused
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
    assert after == before | {"threads": after["threads"]}
    assert report["tokens"]["kills"] > 0


def test_lost_and_doubled_tokens() -> None:
    """They are counted, by id where there are ids, and told."""
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
    """A refusal is excused by a full disk, an error by a lack of memory that it speaks of, and nothing else."""
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
    """Those of any process are found, whole; those of a lack of memory are not counted."""
    own = "Traceback (most recent call last):\n  a line\nValueError: no"
    logged = '{"event": "actor.died", "exception": "Traceback\\n"}'
    short = "Traceback (most recent call last):\n  a line\nMemoryError"
    assert tracebacks(f'{{"event": "one"}}\n{own}\n{{"event": "two"}}\n{short}\n{logged}\n') == [own, logged]
