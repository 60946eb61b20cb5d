"""A server in front of another one: client, front and upstream agree on answers and numbers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import openai
import pytest

from tests.e2e.servers import BLOCK, Server, run_quipu, serving
from tests.processes import PATIENCE_S, eventually, free_ports
from tests.tiny import TINY

KEY = "sk-of-the-upstream"
MESSAGES: list[Any] = [{"role": "user", "content": "word " * 60}]


@attrs.frozen
class Pair:
    front: Server
    back: Server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A front without engines, and the server behind it, which has a key and publishes its cache's contents."""
    folder = tmp_path_factory.mktemp("pair")
    events = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    flag = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events})
    with serving(folder / "back", "--executor", "fake", "--api-key", KEY, "--kv-events-config", flag) as back:
        keys = folder / "keys"
        keys.write_text(f"# of the server behind\n{back.url}/v1 {KEY}\n")
        upstream = f"{back.url}/v1,kv-events={events},tokenizer={TINY},continuous-usage"
        flags = ("--upstream", upstream, "--upstream-key-file", str(keys))
        with serving(folder / "front", "demo", *flags, has_engine=False) as front:
            yield Pair(front, back)


def record_of(server: Server, request_id: str, key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: list[dict[str, Any]] = []

    def look() -> bool:
        response = httpx.get(f"{server.url}/v1/usage/{request_id}", headers=headers, timeout=PATIENCE_S)
        found[:] = [response.json()] if response.status_code == 200 else []
        return bool(found)

    eventually(look, "its record is in the ledger")
    return found[0]


def back_record(pair: Pair, request_id: str) -> dict[str, Any]:
    """Return the record of the server behind, which knows the front's request id as its client's."""

    def find_ids() -> list[str]:
        lines = pair.back.events("request.done")
        return [line["request_id"] for line in lines if line["client_request_id"] == request_id]

    (own_id,) = eventually(find_ids, "the server behind has logged the request")
    return record_of(pair.back, own_id, KEY)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_counts_agree_in_three_places(pair: Pair, streams: bool) -> None:
    """The client's usage, the front's record and the record of the server behind have the same numbers."""
    with pair.front.client() as client:
        for _ in range(2):
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 5, **options}
            raw = client.chat.completions.with_raw_response.create(**asked)
            request_id = raw.headers["x-quipu-request-id"]
            answer: Any = raw.parse()
            usage = [chunk.usage for chunk in answer if chunk.usage][-1] if streams else answer.usage
            front, back = record_of(pair.front, request_id), back_record(pair, request_id)
            names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cache_write_tokens")
            assert {name: front[name] for name in names} == {name: back[name] for name in names}
            assert usage.prompt_tokens == front["prompt_tokens"]
            assert usage.completion_tokens == front["completion_tokens"] == 5
            assert usage.prompt_tokens_details.cached_tokens == front["cached_tokens"]
            assert json.loads(front["upstream_usage"])["prompt_tokens_details"]["audio_tokens"] == 0
            assert (front["prompt_kind"], front["cached_kind"], front["completion_kind"]) == ("known",) * 3
        assert front["cached_tokens"] >= BLOCK


def test_overlap_is_expected_from_events(pair: Pair) -> None:
    """From the published blocks the front predicts how much of a prompt the server behind has cached."""
    with pair.front.client() as client:
        messages: list[Any] = [{"role": "user", "content": "other " * 80}]

        def ask() -> dict[str, Any]:
            raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=2)
            return record_of(pair.front, raw.headers["x-quipu-request-id"])

        first = ask()
        assert first["cached_tokens"] < BLOCK * 2

        def knows() -> bool:
            (upstream,) = pair.front.get("/server_info").json()["upstreams"]
            return bool(upstream["blocks_known"])

        eventually(knows, "its blocks are known")

        def is_predicted() -> bool:
            record = ask()
            return bool(record["router_estimate_tokens"] == record["cached_tokens"] >= 4 * BLOCK)

        eventually(is_predicted, "the events about this prompt's blocks have come")


def test_a_client_that_leaves(pair: Pair) -> None:
    """When a client leaves, the server behind ends its request, too."""
    with pair.front.client() as client:
        stream = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=700, stream=True)
        request_id = stream.response.headers["x-quipu-request-id"]
        assert any(chunk.choices[0].delta.content for chunk in stream), "the answer has begun"
        stream.close()

    def has_ended() -> bool:
        done = pair.back.events("request.done")
        return any(line["client_request_id"] == request_id and line["outcome"] == "cancelled" for line in done)

    eventually(has_ended, "the server behind has noticed")
    front, back = record_of(pair.front, request_id), back_record(pair, request_id)
    assert front["outcome"] == "cancelled" and front["completion_kind"] == "known"
    assert front["prompt_tokens"] == back["prompt_tokens"] and front["cached_tokens"] == back["cached_tokens"]
    assert 0 < front["completion_tokens"] <= back["completion_tokens"]


def test_clients_see_their_own_errors_only(pair: Pair) -> None:
    """The client gets the error of the server behind; nobody gets the front's key."""
    with pair.front.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5, temperature=-1)
    assert refused.value.param == "temperature"
    assert [model.id for model in pair.front.client().models.list()] == ["demo"]
    info = pair.front.get("/server_info").text
    assert KEY not in info and pair.back.url in info and KEY not in pair.front.log_text


def test_sums_agree(pair: Pair) -> None:
    """With no account open, the front's counters equal the sums of its records."""
    result = run_quipu(
        "ledger", "reconcile", "--data-dir", "data", "--metrics-url", f"{pair.front.url}/metrics",
        folder=pair.front.log_path.with_suffix(""),
    )  # fmt: skip
    assert result.returncode == 0 and "running" in result.stdout, result.stdout + result.stderr


def test_engines_of_its_own_beside_upstreams(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may serve one model itself and pass requests for another on."""
    upstream = ("--upstream", pair.back.url, "--engines", "1", "--served-model-name", "own")
    monkeypatch.setenv("QUIPU_UPSTREAM_KEY", KEY)
    with serving(tmp_path / "mixed", str(TINY), *upstream, "--executor", "fake") as mixed, mixed.client() as client:
        eventually(lambda: [model.id for model in client.models.list()] == ["own", "demo"], "both models are listed")
        for model in ("own", "demo"):
            answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens == 3
        engines = mixed.get("/v1/admin/engines").json()
        assert [engine["id"] for engine in engines["engines"]] == [0]
        assert [upstream["id"] for upstream in engines["upstreams"]] == [1]


def test_misuse_is_refused(tmp_path: Path) -> None:
    """A front without upstreams, or with a key for none of them, says why it does not start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        keys = tmp_path / "keys"
        keys.write_text("http://other.example sk-1")
        for flags, words in (
            (("--engines", "0"), "needs an --upstream"),
            (("--upstream", "ftp://x"), "must be http://"),
            (("--upstream", f"{url},colour=red"), "unknown option"),
            (("--upstream", url, "--upstream", f"{url}/v1"), "given twice"),
            (("--upstream", url, "--upstream-key-file", str(keys)), "no --upstream"),
        ):
            result = run_quipu("serve", "demo", *flags, folder=tmp_path)
            assert result.returncode == 2 and words in result.stderr, result.stderr
            assert "sk-1" not in result.stderr
