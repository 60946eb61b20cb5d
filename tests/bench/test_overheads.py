"""How `bench.engine_overhead` and `bench.request_budget` evaluate what they measured."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chat_tokens import measure_row
from bench.engine_overhead import describe, period_of
from bench.http_load import Answer
from bench.request_budget import PARTS, budget_of, make_chat
from bench.spans import FOLDER, Span, own_seconds, read_spans
from tests.tiny import TINY
from tests.vocabularies import Vocabulary


def test_period_and_step() -> None:
    """A step of 40 ms every 42 ms is 5 % overhead; steps of another size or outside the load do not count."""
    steps = [Span("step", 1 + 0.042 * i, 1.04 + 0.042 * i, 2) for i in range(20)]
    others = [Span("step", 0.5, 0.9, 1), Span("step", 1.2, 9.0, 1), Span("step", 3.0, 3.9, 2)]
    streams = [Answer(0.0, tuple(1.041 + 0.042 * i for i in range(20))), Answer(0.0, (0.9, 1.0, 1.9))]
    period = period_of(streams, [*steps, *others])
    assert period.num_streams == 2
    assert period.overhead == pytest.approx(0.05)
    assert period.gap_s == pytest.approx(0.002)
    with pytest.raises(ValueError, match="use longer outputs"):
        period_of(streams, others)


def test_overhead_rows() -> None:
    """Rows are medians of the rounds, each with its limit; one step is subtracted from the time to first token."""
    steps = [Span("step", 0.042 * i, 0.04 + 0.042 * i, 1) for i in range(20)]
    periods = [period_of([Answer(0.0, tuple(0.041 + 0.042 * i for i in range(20)))], steps)] * 3
    rows = describe(periods, [(0.060, 0.040), (0.047, 0.041), (0.05, 0.040)], 1024)["rows"]
    assert [row["name"] for row in rows] == ["overhead_1", "first_token_warm_1024"]
    assert (rows[0]["limit"], rows[1]["limit"]) == (0.04, 8.0)
    assert rows[0]["step_ms"] == pytest.approx(40)
    assert rows[1]["value"] == pytest.approx(10)


def test_own_time() -> None:
    """Nested spans are not counted twice at any depth; spans of other threads are not nested."""
    spans = [
        Span("outer", 0.0, 10.0, 0, (1, 1)),
        Span("inner", 1.0, 4.0, 0, (1, 1)),
        Span("innermost", 2.0, 3.0, 0, (1, 1)),
        Span("other", 2.0, 9.0, 0, (1, 2)),
        Span("later", 5.0, 6.0, 0, (1, 1)),
    ]
    assert own_seconds(spans) == [6.0, 2.0, 1.0, 7.0, 1.0]


def test_budget_adds_up() -> None:
    """Each moment between sending and first token counts for one part; the rest is `elsewhere`."""
    web, engine, executor = (1, 1), (2, 1), (2, 2)
    spans = [
        Span("tokenise", 0.5, 0.9, 0, web),  # of the previous request
        Span("parse", 1.001, 1.002, 0, web),
        Span("tokenise", 1.002, 1.005, 0, web),
        Span("schedule", 1.006, 1.007, 0, engine),
        Span("books", 1.008, 1.034, 0, executor),
        Span("step", 1.009, 1.033, 1, executor),
        Span("schedule", 1.010, 1.012, 0, engine),  # the next step, meanwhile
        Span("detokenise", 1.0345, 1.038, 0, web),
        Span("write", 1.035, 1.037, 0, web),  # nested; the client received it earlier
    ]
    budget = budget_of(Answer(1.0, (1.036, 1.06)), spans)
    expected = {"parse": 1, "tokenise": 3, "schedule": 1, "step": 24, "books": 2, "detokenise": 0.5, "write": 1}
    expected["elsewhere"] = 36 - sum(expected.values())
    assert budget == pytest.approx({"first_token": 36, **dict.fromkeys(PARTS, 0), **expected})
    with pytest.raises(ValueError, match="no step"):
        budget_of(Answer(2.0, (2.1,)), spans)


def test_chats_end_with_user() -> None:
    """A chat has the requested number of turns, rounded to an odd one."""
    chat = make_chat(8, 5, random.Random(1))
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 4 + ["user"]
    assert all(len(turn["content"].split()) == 5 for turn in chat)


def test_spans_of_two_processes(tmp_path: Path) -> None:
    """A watched function returns and raises as before, and its calls are recorded with their size."""
    code = """
        import types
        from bench.spans import watch
        runtime = types.SimpleNamespace(add=lambda a, b: a + b, fail=lambda: 1 / 0)
        watch(runtime, "add", "adding", lambda a, b: a)
        watch(runtime, "fail", "failing")
        assert runtime.add(3, 4) == 7
        try:
            runtime.fail()
        except ZeroDivisionError:
            pass
    """
    for _ in range(2):
        run_with_spans(code, tmp_path)
    (tmp_path / "9.spans").write_bytes(b"half a record")
    spans = read_spans(tmp_path)
    assert [(span.name, span.size) for span in spans] == [("adding", 3), ("failing", 0)] * 2
    assert all(0 <= span.seconds < 60 for span in spans)
    assert spans[0].end_s <= spans[2].start_s


def test_coroutine_turns(tmp_path: Path) -> None:
    """Only a coroutine's turns are spans, not the time it waits; results, exceptions and cancellation pass through."""
    code = """
        import asyncio, types
        from bench.spans import watch
        async def wait(fails=False):
            await asyncio.sleep(0.2)
            if fails:
                raise KeyError
            return 7
        runtime = types.SimpleNamespace(wait=wait)
        watch(runtime, "wait", "waiting")
        assert asyncio.run(runtime.wait()) == 7
        try:
            asyncio.run(runtime.wait(fails=True))
        except KeyError:
            pass
        async def cancel():
            task = asyncio.ensure_future(runtime.wait())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        asyncio.run(cancel())
    """
    run_with_spans(code, tmp_path)
    spans = read_spans(tmp_path)
    assert [span.name for span in spans] == ["waiting"] * 6
    for before, after in (spans[:2], spans[2:4]):
        assert after.start_s - before.end_s > 0.19, "the time it waits is in a span"


def run_with_spans(code: str, folder: Path) -> None:
    """Run an indented program whose watched functions write to `folder`."""
    command = [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())]
    environment = {**os.environ, FOLDER: str(folder)}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).resolve().parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("command", [("engine_overhead", "--quick"), ("request_budget", "--rounds", "2")])
def test_commands_run(command: tuple[str, ...]) -> None:
    """With the tiny model every row is printed, and no part of a budget is negative."""
    root = Path(__file__).resolve().parents[2]
    name, *flags = command
    arguments = [sys.executable, "-m", f"bench.{name}", *flags, "--json", "--model", str(TINY)]
    ended = subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row["value"] for row in json.loads(ended.stdout)["rows"]}
    if name == "engine_overhead":
        assert rows.keys() == {"overhead_1", "overhead_8", "first_token_warm_64"}
    else:
        assert rows.keys() == {*PARTS, "first_token"}
        assert all(value >= 0 for value in rows.values())
        assert all(rows[part] > 0 for part in ("parse", "tokenise", "hash", "match", "step", "detokenise"))


def test_growing_chat_tokens() -> None:
    """The three ways give the same ids, and each is timed."""
    vocabulary = Vocabulary(TINY)
    assert vocabulary.template is not None
    row = measure_row(vocabulary.library, vocabulary.template, 4, 80, 1)
    assert row["num_tokens"] > 4 * 80
    assert all(row[name] > 0 for name in ("whole_ms", "first_ms", "next_ms", "ratio"))
