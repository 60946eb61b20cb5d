"""Output text for the official client on a real model: reproducible under any load, and stopped where requested."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import TIGHT_BLOCKS
from tests.e2e.prompts import PLAIN_TOKENS, VARIED, text_prompt, token_prompt
from tests.e2e.servers import BLOCK, Server, cached_of, full_blocks, usage_of

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
GREEDY = {"temperature": 0}


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    ignore_eos = {"ignore_eos": fields.pop("ignore_eos", True)}
    extra_body = {**ignore_eos, **fields.pop("extra_body", {})}
    arguments = {"model": "demo", "max_tokens": 24, "temperature": 0, **fields}
    return client.completions.create(prompt=prompt, extra_body=extra_body, **arguments)


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].text
    return text


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_outputs_are_reproducible(client: openai.OpenAI, how: dict[str, Any]) -> None:
    """A greedy or seeded output is the same cold, warm, and in a batch with others, where it may be cold as well."""
    prompts = [text_prompt(f"repeat {index} {len(how)}", BLOCK + 4 + 9 * index) for index in range(6)]
    cold = [text_of(complete(client, prompt, **how)) for prompt in prompts[:3]]
    warm = [complete(client, prompt, **how) for prompt in prompts[:3]]
    assert [text_of(answer) for answer in warm] == cold
    assert all(cached_of(answer) > 0 for answer in warm)
    with ThreadPoolExecutor(len(prompts)) as pool:
        crowded = list(pool.map(lambda prompt: text_of(complete(client, prompt, **how)), prompts))
    assert crowded[:3] == cold
    assert [text_of(complete(client, prompt, **how)) for prompt in prompts[3:]] == crowded[3:]


def test_seeds_differ(client: openai.OpenAI) -> None:
    """Different seeds generate different texts."""
    prompt = text_prompt("seeds", 20)
    assert len({text_of(complete(client, prompt, temperature=0.9, seed=seed)) for seed in range(3)}) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    """An output ends before the first stop string, even one across tokens; later tokens are not counted."""
    prompt = text_prompt("stop", 25)
    pieces = [chunk.choices[0].text for chunk in complete(client, prompt, stream=True, extra_body=VARIED)]
    whole = "".join(pieces)
    end = len("".join(pieces[:5]))
    across = whole[end - 2 : end + 2]
    for stop in (across, whole[end + 3 : end + 9]):
        fields = {"stop": [stop, "\u2603 never"], "stream": stream, "extra_body": VARIED}
        if stream:
            chunks = list(complete(client, prompt, stream_options={"include_usage": True}, **fields))
            text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            usage = usage_of(chunks[-1])
        else:
            answer = complete(client, prompt, **fields)
            text, reasons, usage = text_of(answer), [answer.choices[0].finish_reason], usage_of(answer)
        assert text == whole[: whole.index(stop)]
        assert reasons[-1] == "stop" and not any(reasons[:-1])
        needed = whole.index(stop) + len(stop)
        lengths = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
        assert usage["completion_tokens"] == 1 + sum(length < needed for length in lengths)


def test_stop_string_included(client: openai.OpenAI) -> None:
    """With include_stop_str_in_output the output ends with the stop string."""
    prompt = text_prompt("included", 25)
    whole = text_of(complete(client, prompt, extra_body=VARIED))
    stop = whole[12:15]
    answer = complete(client, prompt, stop=stop, extra_body={"include_stop_str_in_output": True, **VARIED})
    assert text_of(answer) == whole[: whole.index(stop) + len(stop)]


def test_stop_token_ids(client: openai.OpenAI) -> None:
    """A stop token ends the output, is counted, and is not in the text."""
    prompt = text_prompt("stop token", 25)
    pieces = [chunk.choices[0].text for chunk in complete(client, prompt, stream=True, extra_body=VARIED)]
    at = next(i for i, piece in enumerate(pieces) if i > 2 and piece not in pieces[:i])
    answer = complete(client, prompt, extra_body={"stop_token_ids": [PLAIN_TOKENS[pieces[at]]], **VARIED})
    assert text_of(answer) == "".join(pieces[:at])
    assert answer.choices[0].finish_reason == "stop"
    assert usage_of(answer)["completion_tokens"] == at + 1


def test_end_of_sequence(client: openai.OpenAI) -> None:
    """EOS ends an output with `stop`; with ignore_eos it continues to max_tokens, with the same beginning."""
    # An untrained model generates EOS by chance: first try seeds that did so once, then others.
    for seed in (304, 713, 514, *range(1000)):
        fields = {"temperature": 2.0, "top_p": 1.0, "seed": seed}
        ended = complete(client, "end", ignore_eos=False, **fields)
        if ended.choices[0].finish_reason == "stop":
            break
    beyond = complete(client, "end", **fields)
    assert text_of(beyond).startswith(text_of(ended)) and len(text_of(beyond)) > len(text_of(ended))
    assert beyond.choices[0].finish_reason == "length"
    assert usage_of(ended)["completion_tokens"] < usage_of(beyond)["completion_tokens"] == 24


def test_preempted(tiny: Server, tight: Server) -> None:
    """In a pool that cannot hold all requests, some are preempted, with the same texts and correct usage."""
    prompts = [token_prompt(f"preempted {index}", 40 + 7 * index) for index in range(8)]
    before = tight.metrics()
    with tiny.client() as roomy, tight.client() as crowded, ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda prompt: complete(roomy, prompt, max_tokens=70), prompts))
        answers = list(pool.map(lambda prompt: complete(crowded, prompt, max_tokens=70), prompts))
    after = tight.wait_at_rest()
    assert after["num_preemptions_total"] > before["num_preemptions_total"]
    assert after["recomputed_tokens_total"] > before["recomputed_tokens_total"]
    assert [text_of(answer) for answer in answers] == [text_of(answer) for answer in expected]
    for prompt, answer in zip(prompts, answers, strict=True):
        usage = usage_of(answer)
        assert (usage["prompt_tokens"], usage["completion_tokens"], cached_of(answer)) == (len(prompt), 70, 0)
    assert after["usage_disputed_total"] == 0
    prompt_tokens = sum(usage_of(answer)["prompt_tokens"] for answer in answers)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == prompt_tokens


def test_full_context(tight: Server) -> None:
    """A prompt may leave room for one token; a longer one is rejected. A chat without a limit fills the context."""
    longest = (TIGHT_BLOCKS - 1) * BLOCK
    prompt = token_prompt("longest", longest)
    with tight.client() as client:
        answers = [complete(client, prompt[:-1], max_tokens=1) for _ in range(2)]
        assert [usage_of(answer)["total_tokens"] for answer in answers] == [longest, longest]
        assert [cached_of(answer) for answer in answers] == [0, full_blocks(longest - 2)]
        chat = [{"role": "user", "content": text_prompt("nearly", 300)}]
        ignore_eos = {"ignore_eos": True}
        by_default = client.chat.completions.create(model="demo", messages=chat, extra_body=ignore_eos)
        assert by_default.choices[0].finish_reason == "length"
        assert usage_of(by_default)["total_tokens"] == longest
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, prompt, max_tokens=1)
        assert refused.value.param == "prompt" and refused.value.code == "context_length_exceeded"
