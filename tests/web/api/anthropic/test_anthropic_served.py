"""The Messages API over a whole runtime: every way a request can end, what breakpoints create, and counting."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.kernels.fake import Dials
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.runtimes import BLOCK, Client, small_runtime
from tests.tiny import TINY
from tests.traps.wire import COMPLETIONS, over_http, samples, settle
from tests.vocabularies import Vocabulary
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, parse_events, stream, text, total
from tests.web.asgi_client import Client as HttpClient

VOCABULARY = Vocabulary(TINY)
LONG = "A quipu is a ledger of cords, and each of its knots is a number that somebody has counted. "
MARK = {"cache_control": {"type": "ephemeral"}}
LONG_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def request(content: Any = "what?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "max_tokens": 8, "temperature": 0, "messages": messages, **fields}


async def both(client: Client, request_body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole response and the events of a streamed one."""
    http = over_http(client)
    exchange, answer = await http.post(PATH, request_body)
    assert exchange.status == 200, answer
    _, events = await stream(http, request_body)
    shown = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert shown == answer["content"][0]["text"]
    end = events[-2]
    assert {name: answer[name] for name in ("stop_reason", "stop_sequence")} == {
        name: end["delta"][name] for name in ("stop_reason", "stop_sequence")
    }
    assert answer["usage"]["output_tokens"] == end["usage"]["output_tokens"]
    return answer, events


# ---------------------------------------------------------------- ends of a request


async def test_length_and_stop_sequences(autojump_clock: trio.abc.Clock) -> None:
    """The text ends before the stop string, and the response says which one it was."""
    async with small_runtime() as client:
        whole, _ = await both(client, request())
        assert (whole["stop_reason"], whole["stop_sequence"], whole["usage"]["output_tokens"]) == (
            "max_tokens",
            None,
            8,
        )
        output = whole["content"][0]["text"]
        stop = output[len(output) // 2 :][:2]
        stopped, _ = await both(client, request(stop_sequences=["never said", stop]))
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
        assert stopped["content"][0]["text"] == output[: output.index(stop)]
        assert stopped["usage"]["output_tokens"] <= 8
        await settle(client)


async def test_end_of_turn(autojump_clock: trio.abc.Clock) -> None:
    """The model's own end token is not a stop sequence; it is counted and not shown."""
    dials = Dials(step_seconds=0.01, eos_after=3, eos_token_id=0)
    async with small_runtime(dials, eos_token_ids=(0,)) as client:
        ended, _ = await both(client, request(stop_sequences=["never said"]))
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
        assert ended["usage"]["output_tokens"] == 4
        await settle(client)


async def test_client_disconnects(autojump_clock: trio.abc.Clock) -> None:
    """A client that disconnects leaves nothing behind, and its request is recorded as cancelled."""
    async with small_runtime() as client:
        async with over_http(client).open("POST", PATH, request(max_tokens=500, stream=True)) as exchange:
            await exchange.wait_started()
            assert b"message_start" in await exchange.read_some()
            exchange.leave()
            with pytest.raises(trio.EndOfChannel):
                while True:
                    await exchange.read_some()
        await settle(client)
        assert samples(client)['requests_total{outcome="cancelled"}'] == 1


async def test_failing_step(autojump_clock: trio.abc.Clock) -> None:
    """A failing step is a 500 before the first token and a last `error` event after it, both in this API's shape."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials) as client:
        http = over_http(client)
        for streamed in (False, True):
            dials.fail_steps = 2
            exchange, answer = await http.post(PATH, request(stream=streamed))
            assert exchange.status == 500 and answer["error"]["type"] == "api_error"
        async with http.open("POST", PATH, request(max_tokens=100, stream=True)) as exchange:
            await exchange.wait_started()
            data = await exchange.read_some()
            dials.fail_steps = 2
            events = parse_events(data + await exchange.read())
        assert [event["type"] for event in (events[0], events[-1])] == ["message_start", "error"]
        assert events[-1]["error"]["type"] == "api_error"
        await settle(client)
        assert samples(client)['requests_total{outcome="failed"}'] == 3


# ---------------------------------------------------------------- the prompt


async def test_prefill_is_continued(autojump_clock: trio.abc.Clock) -> None:
    """The response continues the last message and contains only the new text, as a completion of it would."""
    async with small_runtime() as client:
        http = over_http(client)
        turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "It is a"}]
        answer, _ = await both(client, {**request(), "messages": turns})
        prompt = "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\nIt is a"
        completion = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        _, same = await http.post(COMPLETIONS, completion)
        assert answer["content"][0]["text"] == same["choices"][0]["text"]
        assert total(answer["usage"]) == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize("keep", [False, True])
async def test_sessions_of_claude_code(keep: bool, autojump_clock: trio.abc.Clock) -> None:
    """Two sessions with different billing headers share a prompt, unless the header is kept."""
    async with small_runtime() as client:
        http = HttpClient(make_app(client.runtime.desk, AppOptions(domain="tenant", keep_billing_header=keep)))
        hits = []
        for cch in ("0a1b2", "9f8e7"):
            header = text(f"x-anthropic-billing-header: cch={cch}; cc_version=2.1; cc_entrypoint=cli;")
            request_body = request(system=[header, text(LONG * 3, **MARK)])
            usage = (await http.post(PATH, request_body))[1]["usage"]
            _, counted = await http.post(COUNT_PATH, request_body)
            assert counted["input_tokens"] == total(usage)
            hits.append(usage["cache_read_input_tokens"])
        full_blocks = (total(usage) - 1) // BLOCK * BLOCK
        assert hits[0] == 0
        assert hits[1] < 2 * BLOCK if keep else hits[1] == full_blocks


# ---------------------------------------------------------------- counting


async def test_counting_is_not_serving(autojump_clock: trio.abc.Clock) -> None:
    """A count opens no account, does not reach the engine and writes nothing; it equals the usage of the same body."""
    tool = {"name": "weather", "description": "Of a town.", "input_schema": {"type": "object"}, **LONG_MARK}
    bodies = [
        request(),
        request([text(LONG * 50, **MARK)], max_tokens=2),
        request(tools=[tool], system=[text("Be brief.", **LONG_MARK)], **MARK),
        {**request(), "messages": [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "Well"}]},
    ]
    async with small_runtime(max_model_len=4000, num_blocks=300) as client:
        http = over_http(client)
        before = samples(client)
        counts = [(await http.post(COUNT_PATH, request_body))[1]["input_tokens"] for request_body in bodies]
        assert client.runtime.desk.num_open_requests == 0
        assert samples(client) == before
        usages = [(await http.post(PATH, request_body))[1]["usage"] for request_body in bodies]
        assert [total(usage) for usage in usages] == counts and min(counts) > 0
        await settle(client)


async def test_overlong_prompt_can_be_counted(autojump_clock: trio.abc.Clock) -> None:
    """A prompt beyond the context can be counted, and is refused with the same number when it is to be served."""
    async with small_runtime() as client:
        http = over_http(client)
        request_body = request(LONG * 100)
        _, counted = await http.post(COUNT_PATH, request_body)
        exchange, answer = await http.post(PATH, request_body)
        assert exchange.status == 400 and str(counted["input_tokens"]) in answer["error"]["message"]
        await settle(client)


# ---------------------------------------------------------------- breakpoints


async def test_what_breakpoints_cost(autojump_clock: trio.abc.Clock) -> None:
    """Created tokens are those written up to the last breakpoint, in whole blocks, each under the ttl of the next
    breakpoint after it. Tokens that were read are never created; without a breakpoint none are.
    """
    system = [text(LONG * 2, **LONG_MARK), text(LONG * 2)]
    request_body = request([text(LONG, **MARK), text(LONG * 2)], system=system)
    async with small_runtime() as client:
        http = over_http(client)

        async def usage_of(body: dict[str, Any]) -> dict[str, Any]:
            usage: dict[str, Any] = (await http.post(PATH, body))[1]["usage"]
            return usage

        rendered = f"<|im_start|>system\n{LONG * 4}<|im_end|>\n<|im_start|>user\n{LONG * 3}<|im_end|>\n"
        offsets = VOCABULARY.tokenizer.encode(rendered + "<|im_start|>assistant\n", add_special_tokens=False).offsets

        def tokens_before(prefix: str) -> int:
            return sum(end <= len(prefix) for _, end in offsets) // BLOCK * BLOCK

        to_first = tokens_before(f"<|im_start|>system\n{LONG * 2}")
        to_second = tokens_before(f"<|im_start|>system\n{LONG * 4}<|im_end|>\n<|im_start|>user\n{LONG}")
        cold = await usage_of(request_body)
        assert total(cold) == len(offsets)
        assert cold["cache_creation"] == {
            "ephemeral_1h_input_tokens": to_first,
            "ephemeral_5m_input_tokens": to_second - to_first,
        }
        warm = await usage_of(request_body)
        assert warm["cache_creation_input_tokens"] == 0 and warm["cache_read_input_tokens"] > to_second

        # the system prompt is read up to its last full block; marked tokens after that are created
        other = request([text("Another question. " + LONG, **MARK)], system=system)
        partly = await usage_of(other)
        read = partly["cache_read_input_tokens"]
        assert to_first <= read < to_second and read % BLOCK == 0
        assert partly["cache_creation"]["ephemeral_1h_input_tokens"] == 0
        assert 0 < partly["cache_creation"]["ephemeral_5m_input_tokens"] <= total(partly) - read

        plain = await usage_of(request("Something else. " + LONG * 3))
        assert plain["cache_creation_input_tokens"] == 0 < plain["input_tokens"]
        await settle(client)


async def test_first_event_counts_all_chunks(autojump_clock: trio.abc.Clock) -> None:
    """A prompt prefilled in several steps has its final numbers in `message_start`."""
    async with small_runtime(max_num_batched_tokens=32) as client:
        request_body = request([text(LONG * 10, **MARK)])
        async with over_http(client).open("POST", PATH, {**request_body, "stream": True}) as exchange:
            await exchange.wait_started()
            events = parse_events(await exchange.read())
        start, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert start["cache_creation_input_tokens"] == end["cache_creation_input_tokens"]
        assert start["cache_creation_input_tokens"] >= total(start) // BLOCK * BLOCK - BLOCK > 10 * BLOCK
        await settle(client)


async def test_concurrent_requests_share_created_tokens(autojump_clock: trio.abc.Clock) -> None:
    """Of concurrent requests with the same beginning, at most one creates each token."""
    async with small_runtime() as client:
        http = over_http(client)
        usages: list[dict[str, Any]] = []

        async def one() -> None:
            usages.append((await http.post(PATH, request([text(LONG * 3, **MARK)])))[1]["usage"])

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(one)
        assert len({total(usage) for usage in usages}) == 1
        assert sum(usage["cache_creation_input_tokens"] for usage in usages) <= total(usages[0])
        await settle(client)
