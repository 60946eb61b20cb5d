"""One usage record: who may read it and which fields they see; and who may read the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest

from quipu.actors.ledger.receipt_checking import check_receipt
from quipu.actors.ledger.receipt_keys import read_key_set
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.counts import Estimate
from quipu.actors.messages.outcomes import Fault
from quipu.web.api.admin.usage_source import UsageSource
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.actors.ledger.open_ledgers import opened, write
from tests.web.api.admin.usage_books import ANTHROPIC, MIDNIGHT, OPENAI, BookSource, FolderSource, client_of, record_at
from tests.web.asgi_client import Client

KEYS = {"acme": "sk-of-acme", "b": "sk-of-b", "ops": "sk-of-ops"}
OTHERS_HAVE_IT = (CacheMiss(MissReason.OTHER_DOMAIN, 48), CacheMiss(MissReason.EVICTED, 16))


def keyed(source: UsageSource) -> Client:
    entries = [
        KeyEntry(id=f"id-{tenant}", name=tenant, tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
        for tenant, key in KEYS.items()
    ]
    return client_of(source, KeyStore(entries))


async def get(client: Client, path: str, tenant: str | None) -> tuple[int, Any]:
    headers = {} if tenant is None else {"x-api-key": KEYS[tenant]}
    exchange, answer = await client.get(path, headers)
    return exchange.status, answer


async def test_tenant_sees_own_record() -> None:
    """A tenant sees its numbers as in the ledger and its misses as its client did, but no hash of the chain."""
    record = record_at(5, "req-1", cache_misses=OTHERS_HAVE_IT, cached=Estimate(48), client_request_id="mine")
    record = attrs.evolve(record, fault=Fault.STEP_FAILED)
    status, shown = await get(keyed(BookSource([record_at(1, "req-0"), record])), "/v1/usage/req-1", "acme")
    assert status == 200
    assert shown["object"] == "usage.record" and shown["request_id"] == "req-1" and shown["client_request_id"] == "mine"
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["closed_at"]) == (100, 10, MIDNIGHT + 5)
    assert (shown["cached_tokens"], shown["cached_kind"], shown["prompt_kind"]) == (48, "estimate", "known")
    assert (shown["outcome"], shown["tenant"], shown["recovered"]) == ("finished", "acme", False)
    assert (shown["miss_reason"], shown["miss_token"]) == ("diverged", 48)
    assert shown["cache_misses"] == [{"reason": "diverged", "token": 48}, {"reason": "evicted", "token": 16}]
    assert shown["fault"] == "step_failed"
    assert not {"server", "number", "hash"} & set(shown)
    assert "other_domain" not in str(shown)


async def test_admin_sees_all_records() -> None:
    """An admin sees any tenant's record, its place in the chain, and `other_domain` misses."""
    record = record_at(5, "req-1", cache_misses=OTHERS_HAVE_IT)
    for client, tenant in ((keyed(BookSource([record])), "ops"), (client_of(BookSource([record])), None)):
        status, shown = await get(client, "/v1/usage/req-1", tenant)
        assert (status, shown["miss_reason"], shown["server"]) == (200, "other_domain", "srv-1")
        assert shown["cache_misses"][0] == {"reason": "other_domain", "token": 48}


async def test_other_tenants_record_is_not_found() -> None:
    """Another tenant's record gives the same 404 as an unknown id; a client's own id is not accepted."""
    client = keyed(BookSource([record_at(5, "req-1", client_request_id="alias")]))
    answers = [await get(client, f"/v1/usage/{name}", "b") for name in ("req-1", "req-9")]
    assert answers[0] == answers[1]
    assert answers[0][0] == 404 and answers[0][1]["error"]["code"] == "record_not_found"
    assert (await get(client, "/v1/usage/alias", "acme"))[0] == 404
    assert (await get(client, "/v1/usage/req-1", "acme"))[0] == 200


async def test_odd_ids() -> None:
    """Any path gets a response, and unprintable ids never reach a database."""
    source = BookSource([record_at(5, "req-1")])
    client = client_of(source)
    for path in (
        "/v1/usage/a\0b",
        "/v1/usage/\ud7ff\ue000",
        "/v1/usage/" + "x" * 5000,
        "/v1/usage/",
        "/v1/usage/req-1/x",
    ):
        status, answer = await get(client, path, None)
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error"), path
    assert [query.request_ids for query in source.seen_queries] == [("x" * 5000,)]


@pytest.mark.parametrize("path", [f"{OPENAI}?start_time=0", f"{ANTHROPIC}?starting_at=2025-06-01T00:00:00Z"])
async def test_reports_require_admin_key(path: str) -> None:
    """Reports need an admin key; without keys the server is open."""
    source = BookSource([record_at(1)])
    assert [(await get(keyed(source), path, tenant))[0] for tenant in (None, "acme", "ops")] == [401, 403, 200]
    assert (await get(client_of(source), path, None))[0] == 200
    _, answer = await get(keyed(source), path, "acme")
    assert ("type" in answer) == path.startswith(ANTHROPIC), "an error must have the shape of the API"


async def test_record_requires_key() -> None:
    """With keys configured, a record cannot be read without one."""
    source = BookSource([record_at(1, "req-1")])
    assert (await get(keyed(source), "/v1/usage/req-1", None))[0] == 401
    assert source.seen_queries == []


async def test_receipts_and_their_keys(tmp_path: Path) -> None:
    """Tenants and admins get the same receipt, without what only admins see, and the published keys check it."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", cache_misses=OTHERS_HAVE_IT)
        client = keyed(FolderSource(tmp_path))
        (status, receipt), admins = [await get(client, "/v1/usage/req-1/receipt", name) for name in ("acme", "ops")]
        assert status == 200 and admins == (200, receipt)
        assert "other_domain" not in str(receipt) and receipt["record"]["miss_reason"] == "diverged"
        keys = read_key_set(orjson.dumps((await get(client, "/v1/usage/keys", "b"))[1]))
        verdict = check_receipt(orjson.dumps(receipt), keys)
        assert (verdict.problems, verdict.is_signer_known) == ([], True)
        for tenant, name in (("b", "req-1"), ("acme", "req-9"), ("acme", "keys")):
            assert (await get(client, f"/v1/usage/{name}/receipt", tenant))[0] == 404
        assert (await get(client, "/v1/usage/req-1/receipt", None))[0] == 401


async def test_receipts_need_a_data_directory() -> None:
    """Without the folder that has the key, a receipt and the keys are refused with the reason; records are not."""
    client = keyed(BookSource([record_at(5, "req-1")]))
    for path in ("/v1/usage/req-1/receipt", "/v1/usage/keys"):
        status, answer = await get(client, path, "acme")
        assert (status, answer["error"]["code"]) == (400, "no_receipts")
        assert "signed with a key in the data directory" in answer["error"]["message"]
    assert (await get(client, "/v1/usage/req-9/receipt", "acme"))[0] == 404
    assert (await get(client, "/v1/usage/req-1", "acme"))[0] == 200
