"""Wire names from a whole server: in its responses, metrics, log, KV events and ledger.

Used by `wire_names.py`. Nothing is imported from the server: requests go over its sockets, and its files are read.
"""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

from quipu.web.auth.sealed_texts import KEY_NAME
from tests.e2e.collector import collecting
from tests.e2e.servers import BLOCK, PATIENCE_S, Server, eventually, serving

Names = dict[str, Any]
Main = Callable[[list[str]], int]
CHAT = {"messages": [{"role": "user", "content": "Which knots?"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A cord.", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "A cord.", "max_output_tokens": 2},
    "/v1/messages": {**CHAT, "max_tokens": 2},
}
TOKENIZED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "A cord.", "return_token_strs": True},
    "/detokenize": {"tokens": [67]},
    "/v1/chat/completions/render": CHAT,
}
GENERATED = {"text": "A cord.", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "top_logprobs_num": 1}
SCORED = {
    "/v1/completions": {"logprobs": 1, "prompt_logprobs": 1},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 1, "return_cached_tokens_details": True},
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PATHS = (
    "/health",
    "/ready",
    "/version",
    "/ping",
    "/server_info",
    "/get_server_info",
    "/get_model_info",
    "/load",
    "/props",
    "/slots",
    "/v1/models",
    "/v1/models/demo",
    "/v1/nowhere",
    "/v1/messages/nowhere",
    "/v1/organization/usage/completions?start_time=0&bucket_width=1d&limit=1",
    "/v1/organization/usage/embeddings?start_time=0&bucket_width=1d&limit=1",
    "/v1/organizations/usage_report/messages?starting_at=2026-01-01T00:00:00Z&limit=1",
    "/v1/admin/engines",
    "/ui/session",
    "/ui/usage?since=1",
    "/ui/key-names?id=1",
    "/v1/cache/stats",
    "/v1/cache/tree",
)
TIMING_DEPENDENT = ("loop.", "tracing.")
"""Events that depend on the speed of the machine."""
STANDARD_HEADERS = frozenset({"date", "server", "content-length", "content-type", "transfer-encoding", "connection"})
"""Standard headers that any server sends."""


def server_names(folder: Path, main: Main) -> Names:
    """Send every kind of request once and collect the names. `main` is the entry point of `quipu`."""
    home, ledger = folder / "home", folder / "ledger"
    home.mkdir()
    replay = f"ipc://{folder}/replay"
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events", "replay_endpoint": replay}
    flags = ["--executor", "fake", "--fake-step-seconds", "0", "--log-level", "debug", "--data-dir", str(ledger)]
    flags += ["--num-blocks", "12", "--max-model-len", str(11 * BLOCK), "--kv-events-config", json.dumps(events)]
    flags += ["--kv-host-memory", "1MiB", "--response-store", "1h"]
    names: Names = {}
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        flags += ["--otlp-traces-endpoint", collector.url, "--usage-webhook", f"{collector.url}/usage"]
        server = stack.enter_context(serving(home, *flags))
        answers = list(_answers(server))
        fields: dict[str, set[str]] = {}
        for name, _, answer in answers:
            fields.setdefault(name, set()).update(_paths(answer))
        names["response fields"] = {name: sorted(paths) for name, paths in fields.items()}
        sent = {header.lower() for _, headers, _ in answers for header in headers}
        names["response headers"] = sorted(sent - STANDARD_HEADERS)
        names["KV events"] = _kv_events(server, replay)
        server.wait_at_rest()
        names["metrics"] = metric_names(server.get("/metrics").text)
    names["log lines"] = _log_lines(server.log_text)
    names["ledger"] = _ledger(home, ledger, main)
    return names


def metric_names(text: str) -> Names:
    """Return each metric's type and labels, with the values of labels that do not depend on server or model."""
    metrics: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(text):
        labels = {
            f"{name}={value}" if name not in ("le", "model_name", "server") else name
            for sample in family.samples
            for name, value in sample.labels.items()
        }
        samples = {sample.name for sample in family.samples}
        metrics[family.name] = [family.type, *sorted(samples), *sorted(labels)]
    return metrics


def _answers(server: Server) -> Iterator[tuple[str, httpx.Headers, Any]]:
    headers_sent = {"Idempotency-Key": "a cord", "X-Request-Id": "a knot", "Origin": server.url}
    for path, body in BODIES.items():
        body = {"model": "demo", **body}
        for name, fields in {"": SCORED.get(path, {}), " refused": {"model": "none"}}.items():
            response = server.post(path, {**body, **fields, "no_field": 1}, headers=headers_sent)
            assert (response.status_code == 200) == (name == ""), response.text
            yield path + name, response.headers, response.json()
        fields = {**STREAMED, **SCORED[path]} if path in SCORED else {"stream": True}
        fields.pop("prompt_logprobs", None)  # never streamed
        response = server.post(path, {**body, **fields})
        assert response.status_code == 200, response.text
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        assert events
        for event in map(json.loads, events):
            yield f"{path} streamed {event.get('type') or event['object']}", response.headers, event
    response = server.post("/v1/messages/count_tokens", {"model": "demo", **CHAT})
    yield "/v1/messages/count_tokens", response.headers, response.json()
    for path, body in TOKENIZED.items():
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        yield path, response.headers, response.json()
    response = server.post("/generate", {**GENERATED, "logprob_start_len": 0})
    assert response.status_code == 200, response.text
    yield "/generate", response.headers, response.json()
    response = server.post("/generate", {**GENERATED, "stream": True})
    for event in [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]:
        yield "/generate streamed", response.headers, event
    llama = {"prompt": ["A cord.", 67], "n_predict": 2, "n_probs": 1}
    response = server.post("/completion", llama)
    assert response.status_code == 200, response.text
    yield "/completion", response.headers, response.json()
    response = server.post("/completion", {**llama, "stream": True})
    for event in [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]:
        yield "/completion streamed", response.headers, event
    response = server.post("/v1/responses/input_tokens", {"model": "demo", "input": "Hi."})
    yield "/v1/responses/input_tokens", response.headers, response.json()
    response = server.post("/v1/responses/compact", {"model": "demo", "input": "A cord."})
    assert response.status_code == 200, response.text
    yield "/v1/responses/compact", response.headers, response.json()
    for url in ("/v1/messages", "/v1/completions"):
        response = server.post("/v1/cache/lookup", {"url": url, "body": {"model": "demo", **BODIES[url]}})
        assert response.status_code == 200, response.text
        yield "/v1/cache/lookup", response.headers, response.json()
    yield from _stored(server)
    yield from _batch_answers(server)
    record = server.complete("A cord.")
    name = "req-" + record.json()["id"].partition("req-")[2]
    found = eventually(lambda: _found(server.get(f"/v1/usage/{name}")), "the record is in the ledger")
    assert found is not None
    yield "/v1/usage", found.headers, found.json()
    for path, label in ((f"/v1/usage/{name}/receipt", "/v1/usage receipt"), ("/v1/usage/keys", "/v1/usage/keys")):
        response = server.get(path)
        assert response.status_code == 200, response.text
        yield label, response.headers, response.json()
    for path in PATHS:
        response = server.get(path)
        assert (response.status_code == 404) == path.endswith("nowhere"), response.text
        yield path.partition("?")[0], response.headers, response.json()


def _stored(server: Server) -> Iterator[tuple[str, httpx.Headers, Any]]:
    """Store one object of each kind, and ask for all that there is of it."""

    def ask(method: str, name: str, path: str, body: Any = None) -> tuple[str, httpx.Headers, Any]:
        response = httpx.request(method, server.url + path, json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return f"{method} {name}", response.headers, response.json()

    responses, conversations, chats = "/v1/responses", "/v1/conversations", "/v1/chat/completions"
    said = {"items": [{"role": "user", "content": "A cord."}], "metadata": {}}
    one = {"model": "demo", "max_output_tokens": 2, "background": True}
    created = ask("POST", conversations, conversations, said)
    yield created
    conversation = f"{conversations}/{created[2]['id']}"
    added = ask("POST", f"{conversations}/{{id}}/items", f"{conversation}/items", said)
    yield added
    item = f"{conversation}/items/{added[2]['data'][0]['id']}"
    yield ask("GET", f"{conversations}/{{id}}/items", f"{conversation}/items")
    yield ask("GET", f"{conversations}/{{id}}/items/{{id}}", item)
    yield ask("DELETE", f"{conversations}/{{id}}/items/{{id}}", item)
    yield ask("POST", f"{conversations}/{{id}}", conversation, {"metadata": {}})
    yield ask("GET", f"{conversations}/{{id}}", conversation)
    background = ask("POST", responses, responses, one | {"conversation": created[2]["id"]})
    yield background
    response = f"{responses}/{background[2]['id']}"
    eventually(lambda: server.get(response).json()["status"] == "incomplete", "the background response ends")
    yield ask("POST", f"{responses}/{{id}}/cancel", f"{response}/cancel")
    yield ask("GET", f"{responses}/{{id}}", response)
    yield ask("GET", f"{responses}/{{id}}/input_items", f"{response}/input_items")
    yield ask("DELETE", f"{responses}/{{id}}", response)
    yield ask("DELETE", f"{conversations}/{{id}}", conversation)
    kept = {"model": "demo", **CHAT, "max_tokens": 2, "store": True, "metadata": {}}
    chat = f"{chats}/{ask('POST', chats, chats, kept)[2]['id']}"
    yield ask("GET", chats, chats)
    yield ask("GET", f"{chats}/{{id}}", chat)
    yield ask("GET", f"{chats}/{{id}}/messages", f"{chat}/messages")
    yield ask("POST", f"{chats}/{{id}}", chat, {"metadata": {}})
    yield ask("DELETE", f"{chats}/{{id}}", chat)


def _batch_answers(server: Server) -> Iterator[tuple[str, httpx.Headers, Any]]:
    """Run a batch of each API, and one that cannot be run."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {**body, "max_tokens": 2}}
        for number, body in enumerate(({"prompt": "A cord."}, {"prompt": 1.5}))
    ]
    for name, data in {"": "\n".join(map(json.dumps, lines)).encode(), " refused": b"no line"}.items():
        form = {"files": {"file": ("cords.jsonl", data)}, "data": {"purpose": "batch"}}
        uploaded = httpx.post(f"{server.url}/v1/files", **form, timeout=PATIENCE_S)
        yield "/v1/files", uploaded.headers, uploaded.json()
        wanted = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        created = server.post("/v1/batches", wanted | {"metadata": {"job": "cords"}})
        path = f"/v1/batches/{created.json()['id']}"
        done = eventually(lambda path=path: _ended(server.get(path)), "the batch has ended")
        assert done is not None
        yield f"/v1/batches{name}", done.headers, done.json()
        for what in ("output", "error") if not name else ():
            content = server.get(f"/v1/files/{done.json()[f'{what}_file_id']}/content")
            yield f"lines of the {what} file", content.headers, json.loads(content.text.splitlines()[0])
    yield "/v1/files list", done.headers, server.get("/v1/files").json()
    requests = [{"custom_id": "a", "params": {"model": "demo", **CHAT, "max_tokens": 2}}]
    created = server.post("/v1/messages/batches", {"requests": requests})
    path = f"/v1/messages/batches/{created.json()['id']}"
    done = eventually(lambda: _ended(server.get(path)), "the batch has ended")
    assert done is not None
    yield "/v1/messages/batches", done.headers, done.json()
    results = server.get(f"{path}/results")
    yield "lines of the results", results.headers, json.loads(results.text.splitlines()[0])


def _ended(response: httpx.Response) -> httpx.Response | None:
    batch = response.json()
    has_ended = batch.get("status") in ("completed", "failed") or batch.get("processing_status") == "ended"
    return response if has_ended else None


def _found(response: httpx.Response) -> httpx.Response | None:
    return response if response.status_code == 200 else None


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every key; keys that are numbers or token texts count as one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            named = key if re.fullmatch(r"[a-z_][a-z0-9_]*", key) and not path.endswith("top_logprobs[]") else "*"
            yield f"{path}.{named}".lstrip(".")
            yield from _paths(inner, f"{path}.{named}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{path}[]")


def _log_lines(text: str) -> Names:
    lines: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("{") and "logger" not in (record := json.loads(line)):
            lines.setdefault(record["event"], set()).update(_paths(record))
    return {event: sorted(keys) for event, keys in sorted(lines.items()) if not event.startswith(TIMING_DEPENDENT)}


def _kv_events(server: Server, replay: str) -> Names:
    """Fill the cache until something is evicted, and replay all events."""
    for number in range(4):
        assert server.complete([number] * 5 * BLOCK, 2).status_code == 200
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1000))
        socket.connect(replay)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        names: dict[str, set[str]] = {}
        while payload := socket.recv_multipart()[-1]:
            for event in msgspec.msgpack.decode(payload)[1]:
                names.setdefault(event["type"], set()).update(event)
        return {name: sorted(keys) for name, keys in sorted(names.items())}
    finally:
        context.destroy(linger=0)


def _ledger(home: Path, ledger: Path, main: Main) -> Names:
    """Return the columns of its tables and exports, and the keys of its entries."""
    names: Names = {}
    for path in sorted(ledger.rglob("*")):
        if "batches" in path.parts or path.name == KEY_NAME:
            continue  # what clients have uploaded, and random bytes
        if path.is_file() and path.read_bytes()[:15] == b"SQLite format 3":
            with sqlite3.connect(path) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    columns = database.execute("SELECT name, type FROM pragma_table_info(?)", (table,)).fetchall()
                    names[f"table {table}"] = sorted(" ".join(column) for column in columns)
            database.close()
        elif path.is_file():
            for line in path.read_bytes().splitlines():
                if (start := line.find(b"{")) >= 0:
                    entry = json.loads(line[start:])
                    known = names.setdefault(f"entry {entry['kind']}" if "kind" in entry else path.name, [])
                    known[:] = sorted({*known, *_paths(entry)})
    output = home / "export.csv"
    assert main(["ledger", "export", "--format", "csv", "--output", str(output), "--data-dir", str(ledger)]) == 0
    with output.open(newline="") as lines:
        names["export"] = next(csv.reader(lines))
    return names
