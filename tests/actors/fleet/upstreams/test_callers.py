"""Callers of upstreams and their connections: tenants, retries, https, and upstreams that go silent."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpcore2
import pytest
import trio
import trustme

from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.fleet import upstream_probes
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.request_desk import upstream_pool
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.upstreams import (
    ASK,
    CHAT,
    USAGE,
    Answering,
    Asked,
    FakeUpstream,
    chunk,
    hello,
    open_fake,
    open_served,
)

KEYS = {"sk-of-a": "a", "sk-of-b": "b"}


def key_store() -> KeyStore:
    return KeyStore(
        [
            KeyEntry(id=tenant, name=tenant, tenant=tenant, sha256=hash_key(key), admin=False)
            for key, tenant in KEYS.items()
        ]
    )


async def test_tenants_have_their_own_books() -> None:
    """A client needs a key of this server, its record is its tenant's, and the upstream sees neither."""
    async with open_fake(keys=key_store()) as (served, (fake,)):
        for refused in ({}, {"Authorization": "Bearer sk-of-the-upstream"}):
            assert (await served.client.post(CHAT, json=ASK, headers=refused)).status_code == 401
        assert not fake.asked and not served.journal.closed
        for key in KEYS:
            response = await served.client.post(CHAT, json=ASK, headers={"Authorization": f"Bearer {key}"})
            assert response.json()["usage"] == USAGE
        assert [record.tenant for record in served.journal.closed] == ["a", "b"]
        assert len({record.key_id for record in served.journal.closed}) == 2
        assert {asked.headers["authorization"] for asked in fake.asked} == {"Bearer sk-of-the-upstream"}
        assert not any(key in str(asked) for key in KEYS for asked in fake.asked)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_retries_are_linked(streams: bool) -> None:
    """The same body with the same idempotency key is a retry, within a tenant; the key is not passed on."""
    async with open_fake(keys=key_store()) as (served, (fake,)):

        async def ask(key: str, **fields: object) -> None:
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "order-1"}
            await served.client.post(CHAT, json=ASK | {"stream": streams} | fields, headers=headers)

        await ask("sk-of-a")
        await ask("sk-of-a")
        await ask("sk-of-a", max_tokens=3)
        await ask("sk-of-b")
        first, again, other, foreign = served.journal.closed
        assert again.retry_of == first.request_id and again.idempotency_key == "order-1"
        assert first.retry_of is other.retry_of is foreign.retry_of is None
        assert len(fake.asked) == 4 and not any("order-1" in str(asked.headers) for asked in fake.asked)


@pytest.mark.parametrize("is_trusted", [True, False], ids=["trusted", "unknown"])
async def test_https_upstream(is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream's certificate is checked, also against SSL_CERT_FILE; one that is not trusted is never sent a key."""
    fresh = getattr(httpcore2.default_ssl_context, "__wrapped__", httpcore2.default_ssl_context)
    monkeypatch.setattr(httpcore2, "default_ssl_context", fresh)  # tests/conftest.py caches the first one
    authority = trustme.CA()
    if is_trusted:
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    fake = FakeUpstream(tls=tls)
    async with trio.open_nursery() as nursery:
        await nursery.start(fake.run)
        async with open_served(UpstreamConfig(url=fake.url, key="sk-1"), names=("far",)) as served:
            if is_trusted:
                assert (await served.ask()).json()["usage"] == USAGE
                events = await served.stream()
                assert events[-1] == "[DONE]" and fake.asked[0].headers["authorization"] == "Bearer sk-1"
            else:
                assert (await served.ask()).status_code == 503
                assert not fake.asked and not fake.num_probes
        nursery.cancel_scope.cancel()


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (upstream_pool, "PROBE_S", 0.02),
        (upstream_probes, "SILENCE_S", 0.1),
    ):
        monkeypatch.setattr(module, name, value)


async def test_silent_before_it_answers(quick_probes: None) -> None:
    """A request is sent to another upstream if the first one sends nothing and its probes fail."""

    async def silent(asked: Asked, answering: Answering) -> None:
        fakes[0].is_healthy = False
        await answering.left.wait()

    async with open_fake(silent, hello) as (served, fakes):
        assert (await served.ask()).json()["usage"] == USAGE
        await fakes[0].answerings[0].left.wait()
        assert [len(fake.asked) for fake in fakes] == [1, 1]
        (record,) = served.journal.closed
        assert record.outcome is Outcome.FINISHED and not record.disputed


async def test_silent_in_mid_stream(quick_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an upstream goes silent in mid-stream, the stream ends with an error, and its connection is closed."""

    async def silent(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.event(chunk("Hello "))
        fakes[0].is_hung = True
        monkeypatch.setattr(upstream_probes, "PROBE_TIMEOUT_S", 0.05)
        await answering.left.wait()

    async with open_fake(silent) as (served, fakes):
        events = await served.stream()
        assert events[0] == chunk("Hello ") and "silent" in events[1]["error"]["message"] and events[2] == "[DONE]"
        assert (await served.record()).fault is Fault.ENGINE_DIED
        await fakes[0].answerings[0].left.wait()


async def test_slow_one_that_answers_probes_is_waited_for(quick_probes: None) -> None:
    """An upstream that answers probes is not given up, however long it takes to answer a request."""

    async def slow(asked: Asked, answering: Answering) -> None:
        probed = fakes[0].num_probes
        while fakes[0].num_probes < probed + 40:
            await trio.sleep(0.01)
        await hello(asked, answering)

    async with open_fake(slow) as (served, fakes):
        assert (await served.ask()).json()["usage"] == USAGE
