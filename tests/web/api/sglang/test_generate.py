"""`/generate`: tokens in, tokens out, in SGLang's shape, with each prompt's own numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import pytest

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, PromptNumbers, ScoredDelta, Started
from quipu.actors.messages.outcomes import ErrorKind, FinishReason
from quipu.actors.messages.prompts import TextPrompt, TokenPrompt
from quipu.web.app import make_app
from tests.prompts import prompt_of
from tests.runtimes import BLOCK
from tests.web.api import foreign_servers
from tests.web.api.foreign_servers import LETTER_A, serving
from tests.web.api.openai.test_openai_logprobs import END, FIRST, HALF, HEL, PROMPT
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, columns, failure, hello, record, scripted

PATH = "/generate"
ask, encoded = partial(foreign_servers.ask, PATH), partial(foreign_servers.encoded, PATH)
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


async def told(events: Sequence[OutletEvent], **fields: Any) -> Any:
    return await ask(Client(make_app(FakeDesk(scripted(*events)))), text="To be", **fields)


async def test_tokens_in_tokens_out() -> None:
    """Ids become ids and a text; what is cached is told as it is booked, and sent again it is the same number."""
    async with serving() as (client, journal):
        prompt = prompt_of(3 * BLOCK)
        sampling = {"max_new_tokens": 4, "temperature": 0}
        for cached in (0, 2 * BLOCK):
            answer = await ask(client, input_ids=prompt, sampling_params=sampling)
            assert (answer["text"], answer["output_ids"]) == ("aaaa", [LETTER_A] * 4)
            meta = answer["meta_info"]
            assert meta.pop("e2e_latency") >= 0 and meta.pop("id").startswith("req-")
            assert meta == {
                "finish_reason": {"type": "length", "length": 4},
                "prompt_tokens": 3 * BLOCK,
                "completion_tokens": 4,
                "cached_tokens": cached,
            }
            booked = journal.closed[-1]
            assert (booked.endpoint, booked.prompt_tokens, booked.cached_tokens) == (PATH, 3 * BLOCK, cached)


@pytest.mark.parametrize("stream", [False, True])
async def test_numbers_of_each_prompt(stream: bool) -> None:
    """Each choice of each prompt has that prompt's numbers, which add up to those of the record."""
    async with serving() as (client, journal):
        first, second = prompt_of(2 * BLOCK + 1, seed=1), prompt_of(4 * BLOCK + 3, seed=2)
        await ask(client, input_ids=second, sampling_params={"max_new_tokens": 1})
        body = {"input_ids": [first, second], "sampling_params": {"max_new_tokens": 2, "n": 2}, "stream": stream}
        if stream:
            _, events = await client.stream(PATH, body)
            assert events.pop() == "[DONE]"
            outputs = [[one for one in events if one["index"] == index][-1] for index in range(4)]
        else:
            outputs = await ask(client, **body)
        metas = [output["meta_info"] for output in outputs]
        assert [(meta["prompt_tokens"], meta["cached_tokens"]) for meta in metas] == [
            *[(2 * BLOCK + 1, 0)] * 2,
            *[(4 * BLOCK + 3, 4 * BLOCK)] * 2,
        ]
        assert len({meta["id"] for meta in metas}) == 4
        booked = journal.closed[-1]
        assert (booked.prompt_tokens, booked.cached_tokens) == (6 * BLOCK + 4, 4 * BLOCK)
        assert sum(meta["completion_tokens"] for meta in metas) == booked.completion_tokens == 8


async def test_stream_repeats() -> None:
    """Every event has all text, ids and logprobs so far; only the last one has a finish reason."""
    async with serving() as (client, _):
        sampling = {"max_new_tokens": 3, "temperature": 0}
        body = {"text": "A cord.", "sampling_params": sampling, "stream": True, "return_logprob": True}
        _, events = await client.stream(PATH, {**body, "top_logprobs_num": 1})
        assert events.pop() == "[DONE]"
        assert [event["text"] for event in events] == ["a", "aa", "aaa"]
        for count, event in enumerate(events, 1):
            assert "index" not in event and event["output_ids"] == [LETTER_A] * count
            meta = event["meta_info"]
            assert meta["completion_tokens"] == count and meta["cached_tokens"] == 0 and meta["prompt_tokens"] > 0
            assert meta["input_token_logprobs"] == [] and "input_top_logprobs" not in meta
            assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[LETTER_A, None]] * count
            assert [len(entries) for entries in meta["output_top_logprobs"]] == [1] * count
            assert (meta["finish_reason"] is None) == (count < 3)


async def test_long_streams() -> None:
    """Events of a long answer come so rarely that they have a bounded number of bytes for each of its tokens."""
    events = [STARTED, *[Delta(0, "x" * 1000, 1, None, token_ids=(5,))] * 200, Delta(0, "", 1, FinishReason.LENGTH)]
    desk = FakeDesk(scripted(*events, Closed(record(), None)))
    _, sent = await Client(make_app(desk)).stream(PATH, {"text": "a", "stream": True})
    assert sent.pop() == "[DONE]"
    counts = [event["meta_info"]["completion_tokens"] for event in sent]
    assert counts[:16] == list(range(1, 17)) and counts[-1] == 201 and len(sent[-1]["text"]) == 200_000
    assert sum(len(json.dumps(event)) for event in sent) < 201 * 17_000
    assert counts == sorted(set(counts)) and len(counts) > 30


async def test_logprobs() -> None:
    """Entries are a logprob, an id and, on request, a text; those of the prompt begin with one that has no logprob."""
    told_prompt = ScoredDelta(0, "", 0, None, of_prompt=OfPrompt(columns(PROMPT), [4, 5]))
    outputs = [
        ScoredDelta(0, "Hel", 1, None, token_ids=(7,), scores=(HEL,)),
        ScoredDelta(0, "", 1, None, token_ids=(10,), scores=(HALF,)),
        ScoredDelta(0, "", 1, FinishReason.STOP, stop_token_id=11, token_ids=(11,), scores=(END,)),
    ]
    events = [STARTED, told_prompt, *outputs, Closed(record(), None)]
    fields = {"return_logprob": True, "top_logprobs_num": 2}
    meta = (await told(events, **fields, logprob_start_len=0))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, FIRST.token_id, None], [-0.5, 5, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 5, None], [-1.5, 6, None]]]
    assert meta["output_token_logprobs"] == [[-3.0, 7, None], [-0.75, 10, None], [-9999.0, 11, None]]
    assert meta["output_top_logprobs"][0] == [[-0.25, 8, None], [-2.0, 9, None]]
    assert meta["finish_reason"] == {"type": "stop", "matched": 11}
    meta = (await told(events, **fields, logprob_start_len=1, return_text_in_logprobs=True))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, " be"]] and meta["output_token_logprobs"][0] == [-3.0, 7, "Hel"]
    answer = await told(events, return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == [4, 5] and "output_token_logprobs" not in answer["meta_info"]


async def test_prompt_logprobs_are_computed() -> None:
    """A prompt whose logprobs are asked for is scored without an output, and reads nothing from the cache."""
    async with serving() as (client, _):
        prompt = prompt_of(2 * BLOCK)
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
        for start in (0, 5):
            answer = await ask(client, **body, logprob_start_len=start)
            entries = answer["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in entries] == prompt[start:]
            assert [entry[0] is None for entry in entries] == [True] + [False] * (len(entries) - 1)
            assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == ([], 0)


async def test_lists() -> None:
    """A list of prompts, or several choices, make the answer a list; one prompt of token ids does not."""
    for fields, is_list in (
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [1, 2]}, False),
        ({"input_ids": [[1, 2]]}, True),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
    ):
        client = Client(make_app(FakeDesk(lambda encode: hello(len(encode.prompts) * encode.num_choices))))
        answer = await ask(client, **fields)
        assert isinstance(answer, list) == is_list
        assert all(one["text"] == "Hello" for one in (answer if is_list else [answer]))


async def test_what_reaches_the_desk() -> None:
    """Every sampling field is that of a completion with another name; the defaults are the model's, but for 128."""
    encode = await encoded(input_ids=[1, 2])
    assert encode.prompts == (TokenPrompt((1, 2)),) and encode.max_tokens == 128
    sampling: dict[str, Any] = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.25,
        "stop": "x", "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True,
        "frequency_penalty": 0.5, "presence_penalty": 1, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0},
        "sampling_seed": 11, "json_schema": "{\"type\": \"integer\"}",
    }  # fmt: skip
    encode = await encoded(text="a", sampling_params=sampling, cache_salt="s", priority=0)
    told = encode.sampling
    assert encode.prompts == (TextPrompt("a"),) and (encode.max_tokens, encode.stop, encode.cache_salt) == (
        9,
        ("x",),
        "s",
    )
    assert (told.temperature, told.top_p, told.top_k, told.min_p, told.seed) == (0.5, 0.75, 3, 0.25, 11)
    assert (told.stop_token_ids, told.ignore_eos, encode.skip_special_tokens) == ((7,), True, False)
    assert encode.include_stop and told.rules is not None and told.rules.min_tokens == 2
    rules = attrs.asdict(told.rules)
    assert (rules["frequency_penalty"], rules["presence_penalty"], rules["repetition_penalty"]) == (0.5, 1, 1.5)
    assert encode.grammar is not None and encode.grammar.param == "sampling_params.json_schema"
    for name, source in (("regex", "a+"), ("ebnf", 'root ::= "a"'), ("structural_tag", TAG)):
        encode = await encoded(text="a", sampling_params={name: source})
        assert encode.grammar is not None and encode.grammar.param == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [100]}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1] * 65}, "input_ids"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 129}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"b": 3, "a\n": 1}}, "sampling_params.a\\n"),
        ({"text": "a", "sampling_params": {str(at): 1 for at in range(300)}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "json_schema": {}}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"structural_tag": 5}}, "sampling_params.structural_tag"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "image_data": "https://example.com/a.png"}, "image_data"),
        ({"text": "a", "input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"text": "a", "return_prompt_token_ids": True, "stream": True}, "return_prompt_token_ids"),
        ({"text": "a", "model": "none"}, "model"),
    ],
)
async def test_refused(body: dict[str, Any], param: str) -> None:
    """Each error names the client's own field."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, body)
    assert exchange.status in (400, 404) and answer["error"]["param"] == param, answer
    assert param not in ("text", "sampling_params.min_new_tokens") or f"`{param}" in answer["error"]["message"]


async def test_types_are_those_of_the_field() -> None:
    """A message about a prompt's type names the types of the client's field alone."""
    for body, expected in (
        ({"text": ["a", 1]}, "a string or a list of strings"),
        ({"text": ["a", ["b"]]}, "a string or a list of strings"),
        ({"input_ids": [1, "a"]}, "a list of token ids, or a list of lists of token ids"),
        ({"input_ids": [[1], 2]}, "a list of token ids, or a list of lists of token ids"),
    ):
        _, answer = await Client(make_app(FakeDesk())).post(PATH, body)
        assert answer["error"]["message"] == f"Invalid type for `{next(iter(body))}`: expected {expected}."


async def test_ignored_fields_are_named() -> None:
    """What has no effect is named in the header, wherever it is."""
    exchange, _ = await Client(make_app(FakeDesk())).post(
        PATH, {"text": "a", "rid": "mine", "max_tokens": 3, "sampling_params": {"stream_interval": 8}}
    )
    assert exchange.status == 200
    named = sorted(exchange.headers["x-quipu-ignored-fields"].split(","))
    assert named == ["max_tokens", "rid", "sampling_params.stream_interval"]


async def test_late_errors() -> None:
    """An error before the first event has its own status, one later ends the stream."""
    broken = failure(ErrorKind.INTERNAL)
    exchange, answer = await Client(make_app(FakeDesk(scripted(broken)))).post(PATH, {"text": "a", "stream": True})
    assert exchange.status == 500 and answer["error"]["message"] == "it broke"
    desk = FakeDesk(scripted(STARTED, Delta(0, "x", 1, None), broken))
    _, events = await Client(make_app(desk)).stream(PATH, {"text": "a", "stream": True})
    assert events[0]["text"] == "x" and "it broke" in events[1]["error"]["message"] and events[2:] == ["[DONE]"]


async def test_prompts_before_their_admission() -> None:
    """A choice of a prompt that is not admitted yet has no numbers, rather than another prompt's."""
    numbers = {0: PromptNumbers(40, 32)}
    events = [
        Started(40, 32, 0, by_prompt=numbers),
        Delta(1, "x", 1, FinishReason.LENGTH),
        Delta(0, "x", 1, FinishReason.LENGTH),
    ]
    desk = FakeDesk(scripted(*events, Closed(record(), None)))
    answer = await ask(Client(make_app(desk)), text=["a", "b"])
    assert [one["meta_info"]["cached_tokens"] for one in answer] == [32, None]
