"""Every HTTP request is counted once, by route, method and status, also if it never had an account."""

from __future__ import annotations

import trio.testing

from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.telemetry.answer_counts import AnswerCounts
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk, scripted

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def counts(app: QuipuApp) -> dict[tuple[str, str, str], float]:
    return counts_of(app.answers)


def counts_of(answers: AnswerCounts) -> dict[tuple[str, str, str], float]:
    (family,) = answers.collect()
    assert family.name == "quipu:http_requests" and family.type == "counter"
    return {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in family.samples
    }


async def test_answers_are_counted() -> None:
    """Whole and streamed ones, bad bodies, unknown models, other methods and unknown paths."""
    app = make_app(FakeDesk())
    client = Client(app)
    await client.post(CHAT, BODY)
    await client.stream(CHAT, {**BODY, "stream": True})
    await client.post(CHAT, {**BODY, "temperature": "hot"})
    await client.post(CHAT, {**BODY, "model": "other"})
    await client.get(CHAT)
    await client.get("/v1/models/tiny")
    for path in ("/wp-admin", "/cgi-bin/a", "/wp-login"):
        await client.get(path)
    assert counts(app) == {
        (CHAT, "POST", "200"): 2,
        (CHAT, "POST", "400"): 1,
        (CHAT, "POST", "404"): 1,
        ("unknown", "GET", "405"): 1,
        ("/v1/models/<path:name>", "GET", "200"): 1,
        ("unknown", "GET", "404"): 3,
    }


async def test_refused_keys_are_counted_and_probes_are_not() -> None:
    keys = KeyStore([KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"))])
    app = make_app(FakeDesk(), keys=keys)
    client = Client(app)
    await client.post(CHAT, BODY, {"authorization": "Bearer sk-2"})
    for path in ("/health", "/ready", "/metrics"):
        await client.get(path)
    assert counts(app) == {(CHAT, "POST", "401"): 1}


async def test_client_that_leaves_before_the_answer() -> None:
    """There is no status to count, and still the request is."""
    app = make_app(FakeDesk(scripted()))
    async with Client(app).open("POST", CHAT, BODY) as exchange:
        await trio.testing.wait_all_tasks_blocked()
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert counts(app) == {(CHAT, "POST", "none"): 1}


def test_values_of_labels_are_bounded() -> None:
    """A client's own method is not a label."""
    answers = AnswerCounts()
    for number in range(100):
        answers.add("unknown", f"BREW{number}", 405)
    assert counts_of(answers) == {("unknown", "unknown", "405"): 100}
