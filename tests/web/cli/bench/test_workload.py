"""Workloads: generated prompts depend only on the seed, and invalid lines of a file are refused with their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quipu.web.cli.bench.files import CustomFile, TraceFile
from quipu.web.cli.bench.generated import MultiTurn, RandomPrompts, SharedPrefixes
from quipu.web.cli.bench.prompts import WORDS, Lengths, TokenRange, Wording
from quipu.web.cli.bench.workload import Workload, WorkloadError

IDS = Wording(TokenRange.of_vocabulary(4096), as_ids=True, is_chat=False)
TEXT = Wording(TokenRange(0, len(WORDS)), as_ids=False, is_chat=False)
CHAT = Wording(TokenRange(0, len(WORDS)), as_ids=False, is_chat=True)


def all_fields(workload: Workload) -> list[dict[str, Any]]:
    """Return the fields of each conversation's first request."""
    return [workload.open(place).make_ask([]).fields for place in range(workload.num_conversations)]


def random_prompts(wording: Wording, seed: int = 0, ratio: float = 0.0) -> RandomPrompts:
    return RandomPrompts(wording, seed, Lengths(40, ratio), Lengths(8, ratio))


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 100, 4096, 151_936])
def test_ids_are_in_the_vocabulary(vocab_size: int) -> None:
    """Ids can be drawn from any vocabulary; from a real one, never the first or the last, which are special."""
    tokens = TokenRange.of_vocabulary(vocab_size)
    assert 0 <= tokens.low < tokens.high <= vocab_size
    if vocab_size > 4000:
        assert tokens.low >= 1000
        assert tokens.high <= vocab_size * 0.95


def test_random_is_exact_and_repeatable() -> None:
    """Prompts have exactly the requested length; the same seed gives the same ids, another seed others, all within the
    model's range."""
    first = all_fields(random_prompts(IDS).workload(20))
    assert first == all_fields(random_prompts(IDS).workload(20))
    assert first[:5] == all_fields(random_prompts(IDS).workload(5))
    assert first != all_fields(random_prompts(IDS, seed=1).workload(20))
    assert all(len(fields["prompt"]) == 40 and fields["max_tokens"] == 8 for fields in first)
    assert len({tuple(fields["prompt"]) for fields in first}) == 20
    assert all(IDS.tokens.low <= id_ < IDS.tokens.high for fields in first for id_ in fields["prompt"])


def test_range_ratio() -> None:
    """Lengths are from L*(1-r) to L*(1+r), both included."""
    fields = all_fields(random_prompts(IDS, ratio=0.5).workload(600))
    assert {len(field["prompt"]) for field in fields} == set(range(20, 61))
    assert {field["max_tokens"] for field in fields} == set(range(4, 13))


def test_words_instead_of_ids() -> None:
    """As text a prompt has one word per token; in a chat it is one user message."""
    (text,) = all_fields(random_prompts(TEXT).workload(1))
    assert len(text["prompt"].split()) == 40
    (chat,) = all_fields(random_prompts(CHAT).workload(1))
    assert chat["messages"] == [{"role": "user", "content": text["prompt"]}]


def test_shared_prefixes_take_turns() -> None:
    """Each prefix begins every n-th prompt, and no two prompts have the same end."""
    shared = SharedPrefixes(IDS, 0, num_prefixes=3, prefix_len=32, suffix_len=5, output_len=4)
    prompts = [fields["prompt"] for fields in all_fields(shared.workload(9))]
    assert all(len(prompt) == 37 for prompt in prompts)
    for place, prompt in enumerate(prompts):
        assert prompt[:32] == prompts[place % 3][:32]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 3
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 9


def test_turns_include_the_servers_answers() -> None:
    """A later turn begins with the complete previous one and the server's answer, as messages or as one text."""
    turns = MultiTurn(CHAT, 0, 3, Lengths(6, 0.0), Lengths(4, 0.0))
    conversation = turns.workload(2).open(1)
    assert conversation.num_turns == 3
    first = conversation.make_ask([]).fields["messages"]
    second = conversation.make_ask(["héllo"]).fields["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:2] == [*first, {"role": "assistant", "content": "héllo"}]
    assert second[2]["content"] != first[0]["content"]

    as_text = MultiTurn(TEXT, 0, 3, Lengths(6, 0.0), Lengths(4, 0.0)).workload(2).open(1)
    prompts = [as_text.make_ask(["A", "B"][:num]).fields["prompt"] for num in range(3)]
    assert prompts[1].startswith(prompts[0] + "\nA\n")
    assert prompts[2].startswith(prompts[1] + "\nB\n")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_custom_rows(tmp_path: Path) -> None:
    """Rows have prompts or messages, each with its own tools, choice and length; a missing length is that
    of the flag."""
    choice = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = written(
        tmp_path / "rows.jsonl",
        {"prompt": "p", "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3},
        {"messages": messages, "tools": [TOOL], "tool_choice": choice, "output_len": 4},
        {"prompt": "q", "note": "left out"},
    )
    assert all_fields(CustomFile(path, CHAT, 9).workload(None)) == [
        {"messages": [{"role": "user", "content": "p"}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3},
        {"messages": messages, "tools": [TOOL], "tool_choice": choice, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9},
    ]
    assert CustomFile(path, CHAT, 9).workload(2).num_asks == 2


@pytest.mark.parametrize(
    ("row", "wording", "complaint"),
    [
        ({}, CHAT, "either `prompt` or `messages`"),
        ({"prompt": "p", "messages": []}, CHAT, "either `prompt` or `messages`"),
        ({"prompt": [1, 2]}, CHAT, "token ids"),
        ({"messages": [{"role": "user", "content": "u"}]}, TEXT, "`messages` needs --endpoint /v1/chat/completions"),
        ({"prompt": "p", "tools": [TOOL]}, TEXT, "`tools` needs"),
        ({"prompt": "p", "tool_choice": "auto"}, TEXT, "`tool_choice` needs"),
        ({"prompt": "p", "max_tokens": 0}, TEXT, "not positive"),
        ({"prompt": 7}, TEXT, "`$.prompt`"),
        ([], TEXT, "object"),
    ],
)
def test_custom_row_that_cannot_be_sent(tmp_path: Path, row: Any, wording: Wording, complaint: str) -> None:
    """The row is refused before anything is sent, with its line number and field."""
    path = written(tmp_path / "rows.jsonl", {"prompt": "p"}, row)
    with pytest.raises(WorkloadError) as raised:
        CustomFile(path, wording, 9).workload(None)
    assert complaint in str(raised.value)
    assert f"{path}, line 2" in str(raised.value)


@pytest.mark.parametrize("content", ["", "\n\n", None])
def test_no_rows(tmp_path: Path, content: str | None) -> None:
    """An empty or missing file is refused with the name of its flag."""
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(WorkloadError, match="--dataset-path"):
        CustomFile(path, TEXT, 9).workload(None)


def trace_row(timestamp: float, length: int, *hash_ids: int, output: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}


ROWS = (trace_row(2000, 1200, 0, 1, 2), trace_row(2500, 1536, 0, 1, 3), trace_row(8000, 512, 9, output=0))


def trace(path: Path, wording: Wording = IDS, **settings: Any) -> Workload:
    return TraceFile(path, wording, 0, **{"block_tokens": 512, "speed": 1.0, "scale": 1.0, **settings}).workload(None)


def test_trace(tmp_path: Path) -> None:
    """Equal hash ids give equal blocks of 512 tokens, others do not; lengths are exact; times start with
    the first row."""
    workload = trace(written(tmp_path / "trace.jsonl", *ROWS))
    first, second, third = (fields["prompt"] for fields in all_fields(workload))
    assert (len(first), len(second), len(third)) == (1200, 1536, 512)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1200]
    assert first[:512] != first[512:1024]
    assert third != first[:512]
    assert [fields["max_tokens"] for fields in all_fields(workload)] == [5, 5, 1]
    assert workload.arrivals_s == [0.0, 0.5, 6.0]


def test_trace_speed_and_scale(tmp_path: Path) -> None:
    """A higher speed compresses the schedule; scaling keeps whole blocks whole and shared."""
    path = written(tmp_path / "trace.jsonl", *ROWS)
    workload = trace(path, speed=4.0, scale=1 / 16)
    assert workload.arrivals_s == [0.0, 0.125, 1.5]
    first, second, third = (fields["prompt"] for fields in all_fields(workload))
    assert (len(first), len(second), len(third)) == (75, 96, 32)
    assert first[:64] == second[:64]


def test_trace_as_text(tmp_path: Path) -> None:
    """In a chat, equal ids give equal words."""
    first, second, _ = all_fields(trace(written(tmp_path / "trace.jsonl", *ROWS), CHAT))
    words = [fields["messages"][0]["content"].split() for fields in (first, second)]
    assert len(words[0]) == 1200
    assert words[0][:1024] == words[1][:1024]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (trace_row(3000, 1200, 0, 1), "3 blocks of 512, and `hash_ids` has 2"),
        (trace_row(1000, 512, 0), "`timestamp` decreases"),
        (trace_row(3000, 0), "must be positive"),
        (trace_row(3000, 10, -1), "hash id is negative"),
        ({"timestamp": 1, "input_length": 1}, "output_length"),
        ({**trace_row(3000, 1, 1), "input_length": "long"}, "`$.input_length`"),
    ],
)
def test_trace_row_that_cannot_be_sent(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    """The row is refused before anything is sent, with its line number."""
    with pytest.raises(WorkloadError) as raised:
        trace(written(tmp_path / "trace.jsonl", ROWS[0], row))
    assert complaint in str(raised.value)
    assert "line 2" in str(raised.value)
