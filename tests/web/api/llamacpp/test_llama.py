"""`/completion`, `/props` and `/slots`: llama.cpp's shapes, and the numbers of the books."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import unquote

import attrs
import pytest

from quipu.actors.messages.handler import Closed, Delta, ScoredDelta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason
from quipu.actors.messages.prompts import InfillPrompt, TextPrompt, TokenPrompt
from quipu.actors.request_desk.health import EngineState, EngineStatus
from quipu.kernels.fake import Dials
from quipu.web.api.body_shapes import MAX_STOP_CHARS, MAX_STOP_STRINGS
from quipu.web.app import make_app
from quipu.web.http.sse import MAX_WRITE_BYTES
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, small_runtime
from tests.tiny import TINY
from tests.traps.wire import over_http
from tests.vocabularies import Vocabulary
from tests.web.api import foreign_servers
from tests.web.api.foreign_servers import LETTER_A, serving
from tests.web.api.openai.test_openai_logprobs import HEL
from tests.web.api.openapi.full_apps import ADMIN, TENANT, full_app, keyed
from tests.web.asgi_client import Client, parse_events
from tests.web.fakes import INFO, STARTED, FakeDesk, failure, record, scripted

PATH = "/completion"
ask, encoded = partial(foreign_servers.ask, PATH), partial(foreign_servers.encoded, PATH)
LIBRARY = Vocabulary(TINY).library.tokenizer


async def test_whole_answer() -> None:
    """Text, tokens on request, how it ended, and the numbers of the books; sent again the same prompt is cached."""
    async with serving() as (client, journal):
        prompt = prompt_of(3 * BLOCK)
        for cached in (0, 2 * BLOCK):
            answer = await ask(client, prompt=prompt, n_predict=4, temperature=0, return_tokens=True, seed=5)
            assert (answer["content"], answer["tokens"]) == ("aaaa", [LETTER_A] * 4)
            assert (answer["index"], answer["stop"], answer["model"]) == (0, True, "demo")
            assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("limit", "", False)
            assert (answer["tokens_evaluated"], answer["tokens_cached"]) == (3 * BLOCK, cached)
            timings = answer["timings"]
            assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (cached, 3 * BLOCK - cached, 4)
            assert timings["prompt_ms"] >= 0 and timings["predicted_ms"] >= 0
            settings = answer["generation_settings"]
            assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (4, 0, 5)
            booked = journal.closed[-1]
            assert (booked.endpoint, booked.prompt_tokens, booked.cached_tokens) == (PATH, 3 * BLOCK, cached)
        assert (await ask(client, prompt="a", n_predict=1))["tokens"] == []


async def test_prompts_of_texts_and_ids() -> None:
    """Texts beside ids become their tokens, in order; a list of texts, or with a list in it, is several prompts."""
    async with serving() as (client, journal):
        cord = LIBRARY.encode("A cord.").ids
        for prompt, lengths in (
            ("A cord.", [len(cord)]),
            (["A cord.", 7, 8], [len(cord) + 2]),
            ([7, "A cord.", 8, "A cord."], [2 * len(cord) + 2]),
            (["A cord."], [len(cord)]),
            (["A cord.", "A cord."], [len(cord)] * 2),
            ([[7, "A cord."], "A cord.", [7, 8, 9]], [len(cord) + 1, len(cord), 3]),
        ):
            answer = await ask(client, prompt=prompt, n_predict=1)
            answers = answer if len(lengths) > 1 else [answer]
            assert [one["tokens_evaluated"] for one in answers] == lengths
            assert [one["index"] for one in answers] == list(range(len(lengths)))
            assert journal.closed[-1].prompt_tokens == sum(lengths)
        status, answer = await client.post(PATH, {"prompt": [7, "Hello. " * 2000]})
        assert status.status == 400 and answer["error"]["param"] == "prompt"


async def test_full_context() -> None:
    """Without `n_predict`, the output ends where the context does, and says so."""
    async with small_runtime(Dials(only_token_id=LETTER_A), max_model_len=2 * BLOCK) as runtime:
        answer = await ask(over_http(runtime), prompt=prompt_of(BLOCK))
        assert (answer["truncated"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", BLOCK)


async def test_stream() -> None:
    """Events have the text and tokens that are new; the last one of each choice has its numbers, and no text."""
    async with serving() as (client, journal):
        body = {"prompt": [[7, 8], [7, 8, 9]], "n_predict": 3, "stream": True, "n_probs": 2}
        _, events = await client.stream(PATH, body)
        for index, length in enumerate((2, 3)):
            *parts, last = [event for event in events if event["index"] == index]
            assert [(part["content"], part["tokens"], part["stop"]) for part in parts] == [("a", [LETTER_A], False)] * 3
            assert [part["tokens_predicted"] for part in parts] == [1, 2, 3]
            assert all(len(part["completion_probabilities"][0]["top_logprobs"]) == 2 for part in parts)
            assert (last["content"], last["stop"], last["tokens_evaluated"], last["tokens_cached"]) == (
                "",
                True,
                length,
                0,
            )
        assert [event["stop"] for event in events[-2:]] == [True, True]
        assert journal.closed[-1].prompt_tokens == 5


async def test_long_settings_are_repeated_piece_by_piece() -> None:
    """Each choice ends with the request's settings, which are encoded as its client reads, not all at once."""
    stops, pieces = ["x" * MAX_STOP_CHARS] * MAX_STOP_STRINGS, []
    body = {"prompt": "a", "n_cmpl": 32, "n_predict": 3, "stop": stops, "stream": True}
    async with Client(make_app(FakeDesk())).open("POST", PATH, body) as exchange:
        await exchange.wait_started()
        while not exchange.ended:
            pieces.append(await exchange.read_some())
    ends = [event for event in parse_events(b"".join(pieces)) if event["stop"]]
    assert [event["index"] for event in ends] == list(range(32))
    assert all(event["generation_settings"]["stop"] == stops for event in ends)
    assert max(map(len, pieces)) < MAX_WRITE_BYTES + 2 * MAX_STOP_CHARS * MAX_STOP_STRINGS


async def test_ends_and_probabilities() -> None:
    """A stop string and the model's own end are told apart; probabilities have ids, texts and bytes."""
    events = [STARTED, ScoredDelta(0, "Hel", 1, None, token_ids=(7,), scores=(HEL,))]
    for end, told in (
        (Delta(0, "\n", 1, FinishReason.STOP, "x", token_ids=(5,)), ("word", "x")),
        (Delta(0, "\n", 1, FinishReason.STOP, stop_token_id=5, token_ids=(5,)), ("eos", "")),
    ):
        desk = FakeDesk(scripted(*events, end, Closed(record(), None)))
        answer = await ask(Client(make_app(desk)), prompt="To be", n_probs=1)
        assert (answer["stop_type"], answer["stopping_word"]) == told
        assert answer["has_new_line"] and answer["tokens_predicted"] == 2
        top = {"id": 8, "token": "Ho", "bytes": list(b"Ho"), "logprob": -0.25}
        assert answer["completion_probabilities"] == [
            {"id": 7, "token": "Hel", "bytes": list(b"Hel"), "logprob": -3.0, "top_logprobs": [top]}
        ]


async def test_what_reaches_the_desk() -> None:
    """Each field is that of a completion with another name; -1 stands for no limit, and for a random seed."""
    encode = await encoded(prompt=[1, 2], n_predict=-1, seed=-1)
    assert encode.prompts == (TokenPrompt((1, 2)),) and encode.max_tokens is None
    assert encode.sampling.seed < 2**53
    for fields, limit in (
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4, "n_predict": 5}, 5),
        ({"max_tokens": 3, "n_predict": None}, 3),
        ({"max_tokens": 3, "n_predict": -1}, None),
        ({"max_tokens": -1}, None),
    ):
        assert (await encoded(prompt="a", **fields)).max_tokens == limit, fields
    encode = await encoded(prompt="a", n=2, logprobs=1)
    assert (encode.num_choices, encode.sampling.logprobs) == (2, 1)
    encode = await encoded(prompt="a", n=2, n_cmpl=3, logprobs=1, n_probs=2)
    assert (encode.num_choices, encode.sampling.logprobs) == (3, 2)
    for biases in ([[5, 1.5], [6, False]], {"5": 1.5, "6": -100}):
        encode = await encoded(
            prompt="a", n_predict=9, repeat_penalty=1.5, n_cmpl=2, top_k=3, logit_bias=biases, stop=["x"]
        )
        assert encode.prompts == (TextPrompt("a"),)
        assert (encode.max_tokens, encode.num_choices, encode.stop, encode.sampling.top_k) == (9, 2, ("x",), 3)
        rules = encode.sampling.rules
        assert rules is not None and rules.repetition_penalty == 1.5 and dict(rules.bias) == {5: 1.5, 6: -100.0}
    encode = await encoded(prompt="a", grammar='root ::= "a"')
    assert encode.grammar is not None and encode.grammar.param == "grammar"
    encode = await encoded(prompt="a", json_schema={"type": "integer"}, grammar="")
    assert encode.grammar is not None and encode.grammar.param == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": {"prompt_string": "a"}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [[1], None]}, "prompt"),
        ({"prompt": [[1, [2]]]}, "prompt"),
        ({"prompt": [1, 100]}, "prompt"),
        ({"prompt": [1] * 65}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": -2, "n_predict": 3}, "max_tokens"),
        ({"max_completion_tokens": 0.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"temperature": -1}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.5, "repeat_last_n": 64}, "repeat_last_n"),
        ({"mirostat": 2}, "mirostat"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"logit_bias": [["Hello", 1]]}, "logit_bias"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[5, 1]] * 1025}, "logit_bias"),
        ({"json_schema": 5}, "json_schema"),
        ({"grammar": "root ::= ", "json_schema": {}}, "grammar"),
        ({"return_tokens": 1}, "return_tokens"),
        ({"model": "none"}, "model"),
    ],
)
async def test_refused(fields: dict[str, Any], param: str) -> None:
    """Each error names the client's own field."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, {"prompt": "a", **fields})
    assert exchange.status in (400, 404) and answer["error"]["param"] == param, answer
    if type(fields.get("prompt")) is dict:
        assert "a list of strings and token ids" in answer["error"]["message"]


async def test_late_errors() -> None:
    """An error ends a stream as an event of its own."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "x", 1, None), failure(ErrorKind.INTERNAL)))
    exchange, events = await Client(make_app(desk)).stream(
        "/completions", {"prompt": "a", "stream": True, "id_slot": 3}
    )
    assert events[0]["content"] == "x" and "it broke" in events[1]["error"]["message"] and not events[2:]
    assert exchange.headers["x-quipu-ignored-fields"] == "id_slot"


async def test_props_and_slots() -> None:
    """The model and its defaults, for every key; how many sequences run, for admins, and nothing else of them."""
    settings: dict[str, object] = {"max_num_seqs": 2, "speculative": "off"}
    desk = FakeDesk(info=attrs.evolve(INFO, settings=settings, sampling_defaults={"temperature": 0.25}))
    desk.engine_list = [EngineStatus(number, 1, EngineState.READY, num_running=number + 1) for number in range(2)]
    client = Client(full_app(keyed(), desk=desk))
    for path, statuses in (("/props", [401, 200, 200]), ("/slots", [401, 403, 200])):
        seen = []
        for key in (None, TENANT, ADMIN):
            exchange, _ = await client.get(path, **({} if key is None else {"headers": {"x-api-key": key}}))
            seen.append(exchange.status)
        assert seen == statuses
    _, props = await client.get("/props", headers={"x-api-key": TENANT})
    defaults = props["default_generation_settings"]
    assert (defaults["n_ctx"], defaults["params"]["temperature"], defaults["params"]["top_k"]) == (64, 0.25, 0)
    assert (props["total_slots"], props["model_path"]) == (4, "org/tiny")
    _, slots = await client.get("/slots", headers={"x-api-key": ADMIN})
    assert [slot["is_processing"] for slot in slots] == [True, False, True, True]
    assert slots[0] == {"id": 0, "n_ctx": 64, "speculative": False, "is_processing": True}
    url = "/slots?fail_on_no_slot=1"
    assert (await client.get(url, headers={"x-api-key": ADMIN}))[0].status == 200
    desk.engine_list = [attrs.evolve(status, num_running=9) for status in desk.engine_list]
    assert (await client.get(url, headers={"x-api-key": ADMIN}))[0].status == 503


async def test_infill() -> None:
    """A body is one prompt with a gap, which may have nothing after it; other fields are those of `/completion`."""
    desk = FakeDesk()
    client = Client(make_app(desk))
    gap = {"input_prefix": "a", "input_suffix": ""}
    exchange, answer = await client.post("/infill", {**gap, "prompt": "b", "n_predict": 3, "odd": 1})
    assert exchange.status == 200 and answer["content"] == "Hello" and answer["generation_settings"]["n_predict"] == 3
    assert unquote(exchange.headers["x-quipu-ignored-fields"]) == "odd"
    assert desk.ticket.endpoint == "/infill" and desk.ticket.encode.prompt_param == "input_prefix"
    assert desk.ticket.encode.prompts == (InfillPrompt("ab", "", "input_suffix"),)
    for fields, param in (
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_suffix": "a"}, "input_prefix"),
        ({"input_prefix": [1], "input_suffix": ""}, "input_prefix"),
        ({**gap, "prompt": [1]}, "prompt"),
        ({**gap, "n_predict": -2}, "n_predict"),
        ({**gap, "input_extra": [{"filename": "x", "text": "y"}]}, "input_extra"),
    ):
        exchange, answer = await client.post("/infill", fields)
        assert (exchange.status, answer["error"]["param"]) == (400, param), answer
