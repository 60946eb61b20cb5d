"""The requests that one client sends, row by row.

Each row is as large as a server with default limits accepts, or slightly larger. `docs/operate/limits.md` lists them; a
new endpoint or a field that grows with the request gets a row here, in `tool_rows.py`, `grammar_rows.py`,
`upstream_rows.py`, `explain_rows.py`, `report_rows.py`, `adapter_rows.py`, `pooled_rows.py`, `batch_rows.py` or
`prompt_rows.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.http_load import request_of
from bench.stalls.adapter_rows import ADAPTER_ROWS
from bench.stalls.attack import RawRequest
from bench.stalls.batch_rows import BATCH_ROWS
from bench.stalls.explain_rows import EXPLAIN_ROWS
from bench.stalls.grammar_rows import GRAMMAR_ROWS
from bench.stalls.image_rows import IMAGE_ROWS
from bench.stalls.pooled_rows import POOLED_ROWS
from bench.stalls.prompt_rows import PROMPT_ROWS
from bench.stalls.report_rows import REPORT_ROWS
from bench.stalls.row_parts import (
    CHAT,
    COMPACT,
    COMPLETIONS,
    COUNT,
    INPUT_TOKENS,
    LOOKUP,
    MEBIBYTE,
    MESSAGES,
    RESPONSES,
    Row,
    answered,
    chat,
    completion,
    getting,
    one,
    parts,
    posted,
    response,
    said,
    text_of,
)
from bench.stalls.stored_rows import STORED_ROWS
from bench.stalls.tool_rows import TOOL_ROWS
from bench.stalls.upstream_rows import UPSTREAM_ROWS

LARGEST_BODY = 8 * MEBIBYTE
"""The default of `--max-body-bytes`."""
MILLION_TOKENS_BYTES = 3_180_000
"""Of a text, on a server of the kind `long`."""


def _json(path: str, member: bytes, num_bytes: int) -> Callable[[int], Sequence[RawRequest]]:
    """Send a body of this size whose field `x` is a list of `member` and nothing else."""

    def make(port: int) -> Sequence[RawRequest]:
        head = b'{"model":"demo","prompt":"Hello.","max_tokens":1,"metadata":{},"x":['
        data = head + (member * ((num_bytes - len(head) - 2) // len(member)))[:-1] + b"]}"
        return [RawRequest(posted(port, path, data))]

    return make


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


BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def _marked() -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return chat([said([part | mark for part in parts(14_000, "Hi.")])])


def _same_role() -> dict[str, Any]:
    return chat([said("x" * 380) for _ in range(10_000)])


def _summarized(port: int) -> Sequence[RawRequest]:
    """Send as many summaries as an input may have items, each of which is opened."""
    asked = response([said("Hi."), {"type": "compaction_trigger"}], max_output_tokens=4)
    items = answered(port, RESPONSES, json.dumps(asked).encode()).get("output", [])
    return [RawRequest(request_of(port, response(items * 19_000), path)) for path in (RESPONSES, INPUT_TOKENS)]


def _looked_up(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"url": url, "body": body}


def _stops() -> dict[str, Any]:
    # every token's text may start the common prefix of all stop strings
    return completion("Hi.", max_tokens=400, stop=["a" * 4094 + chr(0x100 + i) for i in range(16)], stream=True)


ROWS: Sequence[Row] = (
    Row("nothing", lambda port: []),
    # ------------------------------------------------------------ texts
    Row("prompt of 0.5 MB", one(COMPLETIONS, lambda: completion(text_of(MEBIBYTE // 2)))),
    Row("prompt of a million tokens", one(COMPLETIONS, lambda: completion(text_of(MILLION_TOKENS_BYTES)))),
    Row("prompt of 4 MB", one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE)))),
    Row("prompt, largest body", one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY - 200)))),
    Row("prompt of emoji, largest body", one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY // 3 - 200, "😀 ")))),
    Row("prompt beyond the body's limit", one(COMPLETIONS, lambda: completion(text_of(20 * MEBIBYTE)))),
    Row("prompt beyond the context", one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE))), server="demo"),
    Row("echo of 1 MB", one(COMPLETIONS, lambda: completion(text_of(MEBIBYTE), echo=True))),
    Row("512 prompts of 4,000 characters", one(COMPLETIONS, lambda: completion([text_of(4000)] * 512))),
    Row("512 prompts of 16 KB", one(COMPLETIONS, lambda: completion([text_of(16_000)] * 512))),
    Row("16 texts of 4 MB", one(COMPLETIONS, lambda: completion(text_of(4 * MEBIBYTE)), 16), concurrency=16),
    Row(
        "100 tokens beside 16 texts of 8 MB",
        one(COMPLETIONS, lambda: completion(text_of(LARGEST_BODY - 200)), 16),
        concurrency=16,
        probe=lambda port: request_of(port, completion(text_of(400)), COMPLETIONS),
        allowed_ms=100,
    ),
    Row("chat of 4 MB", one(CHAT, lambda: chat([said(text_of(4 * MEBIBYTE))]))),
    Row("messages of 4 MB", one(MESSAGES, lambda: chat([said(text_of(4 * MEBIBYTE))]))),
    Row("response of 4 MB", one(RESPONSES, lambda: response(text_of(4 * MEBIBYTE)))),
    Row("count_tokens of 4 MB", one(COUNT, lambda: chat([said(text_of(4 * MEBIBYTE))]), 4), concurrency=4),
    Row("input_tokens of 4 MB", one(INPUT_TOKENS, lambda: response(text_of(4 * MEBIBYTE)), 4), concurrency=4),
    Row("count_tokens, left", _leaving(COUNT, lambda: chat([said(text_of(4 * MEBIBYTE))]), 8), concurrency=8),
    Row(
        "look-up of 4 MB", one(LOOKUP, lambda: _looked_up(CHAT, chat([said(text_of(4 * MEBIBYTE))])), 4), concurrency=4
    ),
    Row(
        "look-up of 10,000 messages",
        one(LOOKUP, lambda: _looked_up(CHAT, chat([said("Hello.") for _ in range(10_000)])), 4),
        concurrency=4,
    ),
    Row(
        "look-up of 4 MB to prefetch",
        one(LOOKUP, lambda: _looked_up(CHAT, chat([said(text_of(4 * MEBIBYTE))])) | {"prefetch": True}, 4),
        concurrency=4,
    ),
    Row("look-up of messages of one role", one(LOOKUP, lambda: _looked_up(MESSAGES, _same_role()), 4), concurrency=4),
    Row(
        "look-ups, left",
        _leaving(LOOKUP, lambda: _looked_up(RESPONSES, response(text_of(4 * MEBIBYTE))), 8),
        concurrency=8,
    ),
    Row(
        "look-up of 512 prompts", one(LOOKUP, lambda: _looked_up(COMPLETIONS, completion([text_of(4000)] * 512)), 4), 4
    ),
    Row("look-up of a million ids", one(LOOKUP, lambda: _looked_up(COMPLETIONS, completion([7] * 1_000_000)), 4), 4),
    Row("blanks and a letter", one(COMPLETIONS, lambda: completion(" " * (LARGEST_BODY - 200) + "a")), server="qwen"),
    Row("64 KB of blanks, 32 times", one(COMPLETIONS, lambda: completion(" " * 65_000 + "a"), 32), 8, "qwen"),
    Row("token ids, a million", one(COMPLETIONS, lambda: completion([7] * 1_000_000))),
    Row("token ids beyond the context", one(COMPLETIONS, lambda: completion([7] * 1_000_000)), server="demo"),
    Row("512 prompts of 2,000 ids", one(COMPLETIONS, lambda: completion([[7] * 2_000] * 512))),
    Row(
        "256 bad words",
        one(COMPLETIONS, lambda: completion("Hi.", bad_words=["x" * 250 + str(i) for i in range(256)])),
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
    Row("10,000 messages", one(CHAT, lambda: chat([said("Hello.") for _ in range(10_000)]))),
    Row("10,000 parts", one(CHAT, lambda: chat([said(parts(10_000, "Hello. "))]))),
    Row("10,000 breakpoints", one(CHAT, lambda: chat([said([part | BREAKPOINT for part in parts(10_000, "Hi. ")])]))),
    Row("10,000 items", one(RESPONSES, lambda: response([said("Hello.")] * 10_000))),
    Row("10,000 items to summarize", _leaving(COMPACT, lambda: {"model": "demo", "input": [said("Hi.")] * 10_000}, 4)),
    Row("19,000 summaries", _summarized),
    Row(
        "10,000 messages of Anthropic's",
        one(MESSAGES, lambda: chat([said("Hello."), said("Yes.", "assistant")] * 5_000)),
    ),
    Row("marks of an hour", one(MESSAGES, _marked)),
    Row("messages of one role", one(MESSAGES, _same_role)),
    *EXPLAIN_ROWS,
    *TOOL_ROWS,
    *GRAMMAR_ROWS,
    *IMAGE_ROWS,
    *UPSTREAM_ROWS,
    # ------------------------------------------------------------ answers
    Row("stop strings, held half matched", one(COMPLETIONS, _stops)),
    Row("512 sequences", one(COMPLETIONS, lambda: completion(["Hi."] * 32, n=16, max_tokens=4))),
    Row("128 choices of a long prompt", one(COMPLETIONS, lambda: completion([7] * 2_500, n=128, max_tokens=4))),
    Row(
        "logprobs of a response, streamed",
        one(
            RESPONSES,
            lambda: response(
                "Hi.",
                include=["message.output_text.logprobs"],
                top_logprobs=20,
                max_output_tokens=2_000,
                ignore_eos=True,
                stream=True,
            ),
        ),
    ),
    Row("prompt logprobs of 16 choices", one(COMPLETIONS, lambda: completion([7] * 2_500, n=16, prompt_logprobs=20))),
    Row("echo with logprobs, whole", one(COMPLETIONS, lambda: completion([7] * 8_000, echo=True, logprobs=20))),
    Row(
        "echo with logprobs, streamed",
        one(COMPLETIONS, lambda: completion([7] * 8_000, echo=True, logprobs=20, stream=True)),
    ),
    Row(
        "logprobs of 16 choices",
        one(CHAT, lambda: chat([said("Hi.")], n=16, max_tokens=300, logprobs=True, top_logprobs=20)),
    ),
    # ------------------------------------------------------------ chat templates
    Row("template that loops", one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="looping"),
    Row("template that writes", one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="writing"),
    Row("template that recurses", one(CHAT, lambda: chat([said("Hi.")]), 4), concurrency=4, server="recursing"),
    # ------------------------------------------------------------ pages
    Row("500 page files", getting("/ui/static/vendor/preact.js", 500), concurrency=50),
    Row(
        "50 usage tables",
        getting("/ui/usage?since=1700000000&until=1703000000&bucket=1h&by=model&by=api_key&by=tenant", 50),
        concurrency=50,
        refused=True,
    ),
    *REPORT_ROWS,
    *ADAPTER_ROWS,
    *BATCH_ROWS,
    *PROMPT_ROWS,
    *POOLED_ROWS,
    *STORED_ROWS,
    # ------------------------------------------------------------ connections
    Row("400 slow posts, 256 descriptors", _slow_posts(400), concurrency=400, server="few_files", refused=True),
    Row("body in chunks of one byte", _chunked(100_000), concurrency=4),
    Row("16 KB of headers", _headed(100), concurrency=8),
    Row("cache statistics, 200 times", getting("/v1/cache/stats?limit=1024", 200), concurrency=8),
    Row("cache tree, 100 times", getting("/v1/cache/tree?limit=2000&depth=1000", 100), concurrency=8),
    Row("cache tree, 64 at once", getting("/v1/cache/tree?limit=2000&depth=1000", 64), concurrency=64),
    Row("1,000 connections", _connecting(1000), concurrency=50),
    Row("200 requests at once", one(COMPLETIONS, lambda: completion("Hi.", max_tokens=8), 200), concurrency=200),
)
