"""What the clients of a chaotic run ask, and what each answer must be: the same as without any disturbance.

A question is asked once before anything is disturbed, and every later answer is compared with that one. Prompts that
nobody asked before (`fresh`) go to the fake executor, whose output is known beforehand.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import attrs
import httpx
import openai

from tests.e2e.prompts import expected_text, text_prompt, token_prompt
from tests.e2e.servers import Server
from tests.tiny import EXECUTOR

TIMEOUT_S = 300.0 if EXECUTOR == "vllm" else 120.0
SLOW_READ_BYTES = 700
Content = dict[str, Any]
"""Everything of an answer that must be the same whenever it is asked."""


@attrs.define
class Answer:
    """What a client has received, complete or not."""

    request_id: str | None = None
    content: Content = attrs.field(factory=dict)
    has_left: bool = False


class Refused(Exception):
    """The server said that it cannot serve now."""


class Failed(Exception):
    """The request ended with an error, or its response was cut off."""


@attrs.frozen
class Manner:
    """How a client behaves."""

    leaves_after: int | None = None
    """Events after which it closes its connection."""
    pauses_s: float = 0.0
    """How long it waits before it reads on, every `SLOW_READ_BYTES`; raw clients only."""


Ask = Callable[["Clients", Manner], Answer]


@attrs.frozen
class Question:
    name: str
    ask: Ask
    streams: bool
    expected: Content | None = None
    """What the answer must be; None: what it was before the first disturbance."""


class Clients:
    """The official clients of one thread, for one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        options: dict[str, Any] = {"max_retries": 0, "timeout": TIMEOUT_S, "api_key": "none"}
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url=server.url, **options)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()


def ask(question: Question, clients: Clients, manner: Manner) -> Answer:
    """Ask, and return what was received. Raises Refused and Failed."""
    try:
        return question.ask(clients, manner)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        raise (Refused if error.status_code in (503, 529) else Failed)(str(error)) from error
    except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
        raise (Refused if isinstance(error.__cause__, httpx.ConnectError) else Failed)(repr(error.__cause__)) from error
    except (openai.APIError, anthropic.APIError, httpx.HTTPError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    except ConnectionRefusedError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- OpenAI's client


class Choices:
    """The choices of a completion or a chat, collected from its chunks or its whole response."""

    def __init__(self) -> None:
        self.content: Content = {"choices": {}}

    def add(self, choice: Any) -> None:
        found = self.content["choices"].setdefault(choice.index, {"text": "", "token_ids": [], "logprobs": []})
        part = choice
        if not hasattr(choice, "text"):
            part = choice.delta if hasattr(choice, "delta") else choice.message
            found["text"] += part.content or ""
        else:
            found["text"] += choice.text
        found["token_ids"] += (choice.model_extra or {}).get("token_ids") or []
        if getattr(choice, "logprobs", None) is not None:
            given = choice.logprobs.model_dump()
            found["logprobs"] += given.get("token_logprobs") or [one["logprob"] for one in given.get("content") or ()]
        if choice.finish_reason is not None:
            found["reason"] = choice.finish_reason

    def add_usage(self, usage: Any) -> None:
        self.content["usage"] = [usage.prompt_tokens, usage.completion_tokens]


def openai_question(name: str, *, streams: bool, chat: bool = False, **fields: Any) -> Question:
    """Ask with OpenAI's client. A stream reads like a plain response, so both must have the same content."""

    def run(clients: Clients, manner: Manner) -> Answer:
        extra = {"ignore_eos": True, "return_token_ids": True, **fields.get("extra_body", {})}
        create: Any = clients.openai.chat.completions if chat else clients.openai.completions
        arguments = {"model": "demo", **fields, "extra_body": extra}
        if streams:
            arguments |= {"stream": True, "stream_options": {"include_usage": True}}
        raw = create.with_raw_response.create(**arguments)
        answer, choices = Answer(raw.headers.get("x-quipu-request-id")), Choices()
        answer.content = choices.content
        if not streams:
            whole = raw.parse()
            for choice in whole.choices:
                choices.add(choice)
            choices.add_usage(whole.usage)
            return answer
        with raw.parse() as events:
            for at, event in enumerate(events):
                if at == manner.leaves_after:
                    answer.has_left = True
                    return answer
                for choice in event.choices:
                    choices.add(choice)
                if event.usage is not None:
                    choices.add_usage(event.usage)
        if "usage" not in choices.content:
            raise Failed("the stream ended without its usage")
        return answer

    return Question(name, run, streams)


# ---------------------------------------------------------------- Anthropic's client


def anthropic_question(name: str, *, streams: bool, **fields: Any) -> Question:
    def run(clients: Clients, manner: Manner) -> Answer:
        arguments = {"model": "demo", **fields, "extra_body": {"ignore_eos": True, "temperature": 0}}
        raw = clients.anthropic.messages.with_raw_response.create(**arguments, stream=streams)
        answer = Answer(raw.headers.get("x-quipu-request-id"))
        if not streams:
            whole = raw.parse()
            (block,) = whole.content
            answer.content = {"text": block.text, "reason": whole.stop_reason, "tokens": whole.usage.output_tokens}
            return answer
        content: Content = {"text": ""}
        answer.content = content
        has_ended = False
        with raw.parse() as events:
            for at, event in enumerate(events):
                if at == manner.leaves_after:
                    answer.has_left = True
                    return answer
                match event.type:
                    case "content_block_delta":
                        content["text"] += event.delta.text
                    case "message_delta":
                        content["reason"], content["tokens"] = event.delta.stop_reason, event.usage.output_tokens
                    case "message_stop":
                        has_ended = True
        if not has_ended:
            raise Failed("the stream ended without message_stop")
        return answer

    return Question(name, run, streams)


# ---------------------------------------------------------------- raw sockets


def raw_question(name: str, prompt: list[int], num_tokens: int, *, streams: bool) -> Question:
    """Ask over a socket of its own. The expected text is the fake executor's."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": streams}
    data = json.dumps(body | {"ignore_eos": True, "return_token_ids": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    def run(clients: Clients, manner: Manner) -> Answer:
        answer = Answer()
        with socket.create_connection(clients.server.address, TIMEOUT_S) as connection:
            if manner.pauses_s:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head % len(data) + data)
            received = bytearray()
            for chunk in _chunks(connection, manner):
                received += chunk
                if manner.leaves_after is not None and received.count(b"data: ") >= manner.leaves_after:
                    answer.has_left = True
                    return answer
        _read_response(bytes(received), answer, streams=streams)
        return answer

    expected = {"choices": {0: {"text": expected_text(prompt, num_tokens), "reason": "length"}}}
    return Question(name, run, streams, expected)


def _chunks(connection: socket.socket, manner: Manner) -> Iterator[bytes]:
    import time

    while chunk := connection.recv(SLOW_READ_BYTES if manner.pauses_s else 65536):
        yield chunk
        if manner.pauses_s:
            time.sleep(manner.pauses_s)


def _read_response(received: bytes, answer: Answer, *, streams: bool) -> None:
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    answer.request_id = headers.get("x-quipu-request-id")
    if not received:
        raise Failed("the connection was closed without a response")
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunked(body)
    if status != 200:
        raise (Refused if status == 503 else Failed)(f"{status}: {body[:500]!r}")
    if not streams:
        events = [json.loads(body)]
    else:
        lines = body.decode().split("\n\n")
        if lines[-2:] != ["data: [DONE]", ""]:
            raise Failed(f"the stream was cut off: {lines[-1]!r}")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    found: dict[str, Any] = {"text": "", "token_ids": []}
    for event in events:
        if "error" in event:
            raise Failed(event["error"]["message"])
        for choice in event["choices"]:
            found["text"] += choice["text"]
            found["token_ids"] += choice.get("token_ids") or []
            found["reason"] = choice["finish_reason"] or found.get("reason")
    answer.content = {"choices": {0: found}}


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, separator, body = body.partition(b"\r\n")
        if not separator:
            raise Failed("the response was cut off between two chunks")
        length = int(size, 16)
        if length == 0:
            return whole
        if len(body) < length + 2:
            raise Failed("the response was cut off in a chunk")
        whole, body = whole + body[:length], body[length + 2 :]
    raise Failed("the response was cut off")


# ---------------------------------------------------------------- what is asked

REGEX = {"structured_outputs": {"regex": "[a-z]{3,8}( [a-z]{2,9}){4,12}"}}


def fixed_questions(*, long: int) -> list[Question]:
    """Return questions that are asked again and again, `long` tokens at most."""
    conversation = [{"role": "user", "content": text_prompt("chaos", 30)}]
    longer = [
        *conversation,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": text_prompt("and", 9)},
    ]
    warm = {"temperature": 0.9, "seed": 11}
    found = []
    for streams in (False, True):
        tag = " streamed" if streams else ""
        found += [
            openai_question(
                f"completion{tag}", streams=streams, prompt=token_prompt("plain", 70), max_tokens=long, **warm
            ),
            openai_question(
                f"scores{tag}", streams=streams, prompt=token_prompt("s", 40), max_tokens=long // 3, logprobs=2, **warm
            ),
            openai_question(
                f"four choices{tag}", streams=streams, prompt=token_prompt("n", 50), max_tokens=long // 2, n=4, **warm
            ),
            openai_question(
                f"grammar{tag}",
                streams=streams,
                chat=True,
                messages=conversation,
                max_completion_tokens=40,
                extra_body={**REGEX, "ignore_eos": False},
                **warm,
            ),
            openai_question(
                f"chat{tag}", streams=streams, chat=True, messages=longer, max_completion_tokens=long, **warm
            ),
            anthropic_question(f"message{tag}", streams=streams, messages=conversation, max_tokens=long),
            anthropic_question(f"answer{tag}", streams=streams, messages=longer, max_tokens=long // 2),
        ]
    return found


def fresh_question(rng: random.Random, *, streams: bool, long: int) -> Question:
    """Return a question that nobody asked before, to a fake executor; some share a beginning with others."""
    prompt = token_prompt(f"shared {rng.randrange(6)}", rng.randrange(20, 200)) + token_prompt(str(rng.random()), 8)
    return raw_question("raw", prompt, rng.randrange(4, 2 * long), streams=streams)
