"""The requests that one client sends, row by row.

Each row is as large as a server with default limits accepts, or slightly larger. `docs/limits.md` lists them; a new
endpoint or a field that grows with the request gets a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from bench.http_load import request_of
from bench.stalls.attack import RawRequest

MEBIBYTE = 1 << 20
ALLOWED_MS = 50.0
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LARGEST_BODY = 8 * MEBIBYTE
"""The default of `--max-body-bytes`."""
WORDS = "A quipu is a ledger of knotted cords, and what is tied into it stays. "


@attrs.frozen
class Row:
    name: str
    make: Callable[[int], Sequence[RawRequest]]
    """Makes the requests for a server at the given port."""
    concurrency: int = 1
    server: str = "long"
    """Key of `servers.KINDS` to send it to."""
    refused: bool = False
    """Whether overload is expected: a 503 with Retry-After is not a fault."""
    probe: Callable[[int], bytes] | None = None
    """A small request to send instead of `/health`; `health_ms` then measures its responses."""
    allowed_ms: float = ALLOWED_MS
    """How much longer than in the row `nothing` `/health`, or the probe, may wait."""


def text_of(num_bytes: int, words: str = WORDS) -> str:
    return (words * (num_bytes // len(words.encode()) + 1)).encode()[:num_bytes].decode("utf-8", "ignore")


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 1} | fields


def chat(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": messages, "max_tokens": 1} | fields


def response(items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": items, "max_output_tokens": 1} | fields


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def parts(num_parts: int, text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for _ in range(num_parts)]


def _one(path: str, body: Callable[[], dict[str, Any]], times: int = 1) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [RawRequest(request_of(port, body(), path))] * times


def _json(path: str, member: bytes, num_bytes: int) -> Callable[[int], Sequence[RawRequest]]:
    """Send a body of this size whose field `x` is a list of `member` and nothing else."""

    def make(port: int) -> Sequence[RawRequest]:
        head = b'{"model":"demo","prompt":"Hello.","max_tokens":1,"metadata":{},"x":['
        data = head + (member * ((num_bytes - len(head) - 2) // len(member)))[:-1] + b"]}"
        return [RawRequest(posted(port, path, data))]

    return make


def posted(port: int, path: str, data: bytes) -> bytes:
    """Return a whole request with this body."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def _nested(path: str, depth: int) -> Callable[[int], Sequence[RawRequest]]:
    def make(port: int) -> Sequence[RawRequest]:
        data = b'{"model":"demo","prompt":"Hello.","max_tokens":1,"x":' + b"[" * depth + b"]" * depth + b"}"
        return [RawRequest(posted(port, path, data))]

    return make


def _slow_posts(count: int) -> Callable[[int], Sequence[RawRequest]]:
    def make(port: int) -> Sequence[RawRequest]:
        whole = posted(port, COMPLETIONS, b'{"model":"demo","prompt":"Hello."}')
        return [RawRequest(whole[:-10], is_complete=False)] * count

    return make


def _chunked(num_bytes: int) -> Callable[[int], Sequence[RawRequest]]:
    def make(port: int) -> Sequence[RawRequest]:
        data = (b'{"model":"demo","max_tokens":1,"prompt":"' + b"x" * num_bytes)[: num_bytes - 2] + b'"}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        return [RawRequest(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")] * 4

    return make


def _headed(times: int) -> Callable[[int], Sequence[RawRequest]]:
    def make(port: int) -> Sequence[RawRequest]:
        head, _, body = posted(port, COMPLETIONS, b'{"model":"demo","prompt":"Hello.","max_tokens":1}').partition(
            b"\r\n\r\n"
        )
        return [
            RawRequest(head + b"".join(b"\r\nx%d: y" % number for number in range(1500)) + b"\r\n\r\n" + body)
        ] * times

    return make


def _connecting(times: int) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [RawRequest(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")] * times


def _leaving(path: str, body: Callable[[], dict[str, Any]], times: int) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [RawRequest(request_of(port, body(), path), disconnect_after_s=0.3)] * times


def _marked() -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return chat([said([part | mark for part in parts(14_000, "Hi.")])])


def _same_role() -> dict[str, Any]:
    return chat([said("x" * 380) for _ in range(10_000)])


def _results() -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} for i in range(4_000)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": "y" * 800} for i in range(4_000)]
    return chat([said("Go."), said(calls, "assistant"), said(results)])


def _tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    properties = {f"p{i}": {"type": "string", "description": "What it is for."} for i in range(num_properties)}
    schema = {"type": "object", "properties": properties}
    return [{"name": f"tool{i}", "description": "Does it.", "input_schema": schema} for i in range(count)]


def _flat_tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    tools = _tools(count, num_properties)
    return [{"type": "function", "name": tool["name"], "parameters": tool["input_schema"]} for tool in tools]


def _nested_tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    tools = _tools(count, num_properties)
    functions = [{"name": tool["name"], "parameters": tool["input_schema"]} for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


def _deep_tools() -> list[dict[str, Any]]:
    """Return tools whose schemas nest nearly as deeply as a body may."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(490):
        schema = {"type": "object", "properties": {"x": schema}}
    return [{"type": "function", "function": {"name": f"tool{i}", "parameters": schema}} for i in range(100)]


def _allowed() -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(2048)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def _response(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": text, "max_output_tokens": 1, **fields}


def _calls() -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"x": [%s1]}' % ("1, " * 60)}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(4_000)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "y" * 800} for i in range(4_000)]
    return chat([said("Go."), {"role": "assistant", "content": None, "tool_calls": calls}, *results])


def _stops() -> dict[str, Any]:
    # every token's text may start the common prefix of all stop strings
    return completion("Hi.", max_tokens=400, stop=["a" * 4094 + chr(0x100 + i) for i in range(16)], stream=True)


ROWS: Sequence[Row] = (
    Row("nothing", lambda port: []),
    # ------------------------------------------------------------ texts
    Row("prompt of 0.5 MB", _one(COMPLETIONS, lambda: completion(text_of(MEBIBYTE // 2)))),
    Row("prompt of 4 MB", _one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE)))),
    Row("prompt, largest body", _one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY - 200)))),
    Row(
        "prompt of emoji, largest body", _one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY // 3 - 200, "😀 ")))
    ),
    Row("prompt beyond the body's limit", _one(COMPLETIONS, lambda: completion(text_of(20 * MEBIBYTE)))),
    Row("prompt beyond the context", _one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE))), server="demo"),
    Row("echo of 1 MB", _one(COMPLETIONS, lambda: completion(text_of(MEBIBYTE), echo=True))),
    Row("512 prompts of 4,000 characters", _one(COMPLETIONS, lambda: completion([text_of(4000)] * 512))),
    Row("512 prompts of 16 KB", _one(COMPLETIONS, lambda: completion([text_of(16_000)] * 512))),
    Row("16 texts of 4 MB", _one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE)), 16), concurrency=16),
    Row(
        "100 tokens beside 16 texts of 8 MB",
        _one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY - 200)), 16),
        concurrency=16,
        probe=lambda port: request_of(port, completion(text_of(400)), COMPLETIONS),
        allowed_ms=100,
    ),
    Row("chat of 4 MB", _one(CHAT, lambda: chat([said(text_of(4 * MEBIBYTE))]))),
    Row("messages of 4 MB", _one(MESSAGES, lambda: chat([said(text_of(4 * MEBIBYTE))]))),
    Row("response of 4 MB", _one(RESPONSES, lambda: response(text_of(4 * MEBIBYTE)))),
    Row("count_tokens of 4 MB", _one(COUNT, lambda: chat([said(text_of(4 * MEBIBYTE))]), 4), concurrency=4),
    Row("count_tokens, left", _leaving(COUNT, lambda: chat([said(text_of(4 * MEBIBYTE))]), 8), concurrency=8),
    Row("blanks and a letter", _one(COMPLETIONS, lambda: completion(" " * (LARGEST_BODY - 200) + "a")), server="qwen"),
    Row("64 KB of blanks, 32 times", _one(COMPLETIONS, lambda: completion(" " * 65_000 + "a"), 32), 8, "qwen"),
    Row("token ids, a million", _one(COMPLETIONS, lambda: completion([7] * 1_000_000))),
    Row("token ids beyond the context", _one(COMPLETIONS, lambda: completion([7] * 1_000_000)), server="demo"),
    Row("512 prompts of 2,000 ids", _one(COMPLETIONS, lambda: completion([[7] * 2_000] * 512))),
    Row(
        "256 bad words",
        _one(COMPLETIONS, lambda: completion("Hi.", bad_words=["x" * 250 + str(i) for i in range(256)])),
    ),
    # ------------------------------------------------------------ JSON
    Row("JSON of small objects", _json(COMPLETIONS, b'{"a":1},', LARGEST_BODY)),
    Row("JSON of empty lists", _json(COMPLETIONS, b"[],", LARGEST_BODY)),
    Row("JSON of empty texts", _json(COMPLETIONS, b'"",', LARGEST_BODY)),
    Row("JSON of numbers", _json(COMPLETIONS, b"1,", 4 * MEBIBYTE)),
    Row("JSON of small objects, 15 MB", _json(COMPLETIONS, b'{"a":1},', 15 * MEBIBYTE)),
    Row("JSON nested 990 deep", _nested(COMPLETIONS, 990)),
    Row("JSON nested 100,000 deep", _nested(COMPLETIONS, 100_000)),
    Row("16 bodies of 8 MB", _json(COMPLETIONS, b'"abcdefgh",', LARGEST_BODY), concurrency=16, refused=True),
    # ------------------------------------------------------------ conversations
    Row("10,000 messages", _one(CHAT, lambda: chat([said("Hello.") for _ in range(10_000)]))),
    Row("10,000 parts", _one(CHAT, lambda: chat([said(parts(10_000, "Hello. "))]))),
    Row("10,000 items", _one(RESPONSES, lambda: response([said("Hello.")] * 10_000))),
    Row(
        "10,000 messages of Anthropic's",
        _one(MESSAGES, lambda: chat([said("Hello."), said("Yes.", "assistant")] * 5_000)),
    ),
    Row("marks of an hour", _one(MESSAGES, _marked)),
    Row("messages of one role", _one(MESSAGES, _same_role)),
    Row("4,000 tool results", _one(MESSAGES, _results)),
    Row("1,024 tools", _one(MESSAGES, lambda: chat([said("Hi.")], tools=_tools(1024, 20)))),
    Row("4 MB of tool schemas", _one(MESSAGES, lambda: chat([said("Hi.")], tools=_tools(50, 1300)))),
    Row("1,024 tools on chat", _one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(1024, 20)))),
    Row("1,024 tools on responses", _one(RESPONSES, lambda: _response("Hi.", tools=_flat_tools(1024, 20)))),
    Row("deep tool schema", _one(CHAT, lambda: chat([said("Hi.")], tools=_deep_tools()))),
    Row("tools by name", _one(CHAT, lambda: chat([said("Hi.")], tools=_nested_tools(5, 5), tool_choice=_allowed()))),
    Row("20,000 documents", _one(CHAT, lambda: chat([said("Hi.")], documents=[{"text": "x" * 300}] * 20_000))),
    Row("4,000 tool calls", _one(CHAT, _calls)),
    Row("tools with marks", _one(MESSAGES, lambda: chat([said(parts(1, "Hi."))], tools=_marked_tools()))),
    # ------------------------------------------------------------ answers
    Row("stop strings, held half matched", _one(COMPLETIONS, _stops)),
    Row("512 sequences", _one(COMPLETIONS, lambda: completion(["Hi."] * 32, n=16, max_tokens=4))),
    Row("prompt logprobs of 16 choices", _one(COMPLETIONS, lambda: completion([7] * 2_500, n=16, prompt_logprobs=20))),
    Row("echo with logprobs, whole", _one(COMPLETIONS, lambda: completion([7] * 8_000, echo=True, logprobs=20))),
    Row(
        "echo with logprobs, streamed",
        _one(COMPLETIONS, lambda: completion([7] * 8_000, echo=True, logprobs=20, stream=True)),
    ),
    Row(
        "logprobs of 16 choices",
        _one(CHAT, lambda: chat([said("Hi.")], n=16, max_tokens=300, logprobs=True, top_logprobs=20)),
    ),
    # ------------------------------------------------------------ chat templates
    Row("template that loops", _one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="looping"),
    Row("template that writes", _one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="writing"),
    Row("template that recurses", _one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="recursing"),
    # ------------------------------------------------------------ connections
    Row("400 slow posts, 256 descriptors", _slow_posts(400), concurrency=400, server="few_files", refused=True),
    Row("body in chunks of one byte", _chunked(100_000), concurrency=4),
    Row("16 KB of headers", _headed(100), concurrency=8),
    Row("1,000 connections", _connecting(1000), concurrency=50),
    Row("200 requests at once", _one(COMPLETIONS, lambda: completion("Hi.", max_tokens=8), 200), concurrency=200),
)


def _marked_tools() -> list[dict[str, Any]]:
    tools = _tools(500, 50)
    for at in (100, 200, 300):
        tools[at] = tools[at] | {"cache_control": {"type": "ephemeral"}}
    return tools


def size_of(raws: Sequence[RawRequest]) -> int:
    """Return the total size in bytes."""
    return sum(len(raw.data) for raw in raws)


__all__ = ["ROWS", "Row", "chat", "completion", "said", "size_of", "text_of"]
