"""`GET /ui/usage`: who sees what, the numbers and their cost, the export, and its bounds."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from quipu.actors.messages.outcomes import Outcome
from quipu.web.api.admin.prices import PriceList, read_prices
from quipu.web.app import make_app
from quipu.web.auth.keys import KeyStore
from quipu.web.ui import table_report
from tests.web.api.admin.usage_books import DAY, MIDNIGHT, BookSource, record_at
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import FakeDesk
from tests.web.ui.test_page_files import KEYS, keyed

RANGE = {"since": MIDNIGHT, "until": MIDNIGHT + 2 * DAY}
RECORDS = [
    record_at(60, "r1"),
    record_at(3700, "r2", model="=big", key_id=None, completion_tokens=1000),
    record_at(3800, "r3", tenant="ops", disputed=True),
    record_at(DAY + 1, "r4", disputed=True),
    record_at(DAY + 2, "r5", outcome=Outcome.REJECTED),
    record_at(3 * DAY, "r6"),
]
PRICES = """
[[prices]]
model = "demo"
currency = "EUR"
input = 0.5
cached_input = 0.05
output = 1.5

[[prices]]
model = "demo"
currency = "USD"
input = 1
output = 2
from = 2025-06-02
"""


def client_of(*, keys: KeyStore | None = None, prices: PriceList | None = None, source: Any = None) -> Client:
    return Client(make_app(FakeDesk(), None, keys, usage=source or BookSource(RECORDS), prices=prices))


def prices_in(folder: Path) -> PriceList:
    path = folder / "prices.toml"
    path.write_text(PRICES)
    return read_prices(path)


async def get(client: Client, key: str | None = None, **parameters: Any) -> tuple[Exchange, Any]:
    query = urlencode({**RANGE, **parameters}, doseq=True)
    return await client.get(f"/ui/usage?{query}", {} if key is None else {"x-api-key": key})


async def test_groups_and_total() -> None:
    """Rows are the ledger's sums by group, the total is the sum of the rows; rejected requests count in neither."""
    _, answer = await get(client_of(), by=["tenant", "model"])
    rows = [(row["tenant"], row["model"], row["requests"], row["prompt_tokens"]) for row in answer["rows"]]
    assert rows == [("acme", "=big", 1, 100), ("acme", "demo", 2, 200), ("ops", "demo", 1, 100)]
    total = answer["total"]
    assert (total["requests"], total["prompt_tokens"], total["cached_tokens"]) == (4, 400, 192)
    assert (total["completion_tokens"], total["disputed"]) == (1030, 2)
    assert [found["request_id"] for found in answer["disputed"]] == ["r4", "r3"]
    assert answer["has_prices"] is False and total["cost"] == {}


async def test_adapters_have_their_model_beside_them() -> None:
    """Rows by model, disputed accounts and the export name the model of an adapter; a model itself has no parent."""
    books = [record_at(60, "r1"), record_at(70, "r2", model="pirate", parent="demo", disputed=True)]
    client = client_of(source=BookSource(books))
    _, answer = await get(client, by=["model"])
    assert [(row["model"], row["parent"]) for row in answer["rows"]] == [("demo", None), ("pirate", "demo")]
    assert [(found["model"], found["parent"]) for found in answer["disputed"]] == [("pirate", "demo")]
    _, answer = await get(client, by=["tenant"])
    assert [row["requests"] for row in answer["rows"]] == [2] and "parent" not in answer["rows"][0]
    query = urlencode({**RANGE, "by": "model", "format": "csv"})
    async with client.open("GET", f"/ui/usage?{query}") as exchange:
        await exchange.wait_started()
        rows = list(csv.DictReader(io.StringIO((await exchange.read()).decode())))
    assert [(row["model"], row["parent"]) for row in rows] == [("demo", ""), ("pirate", "demo")]


async def test_kinds() -> None:
    """Texts, embeddings and scores have rows of their own, in the export too, and together they are the total."""
    kinds = ("generate", "embed", "score", "embed")
    client = client_of(source=BookSource([record_at(at, kind=kind) for at, kind in enumerate(kinds)]))
    _, answer = await get(client, by=["kind"])
    rows = [(row["kind"], row["requests"], row["prompt_tokens"]) for row in answer["rows"]]
    assert rows == [("embed", 2, 200), ("generate", 1, 100), ("score", 1, 100)]
    assert (answer["by"], answer["total"]["requests"]) == (["kind"], 4)
    query = urlencode({**RANGE, "by": ["model", "kind"], "format": "csv"}, doseq=True)
    async with client.open("GET", f"/ui/usage?{query}") as exchange:
        await exchange.wait_started()
        exported = list(csv.DictReader(io.StringIO((await exchange.read()).decode())))
    assert [(row["model"], row["kind"], row["requests"]) for row in exported] == [
        ("demo", kind, number) for kind, number in (("embed", "2"), ("generate", "1"), ("score", "1"))
    ]


async def test_buckets() -> None:
    """Only buckets in which a request ended are listed, oldest first."""
    _, answer = await get(client_of(), bucket="1h")
    assert [(row["start"] - MIDNIGHT, row["requests"]) for row in answer["rows"]] == [(0, 1), (3600, 2), (DAY, 1)]


async def test_tenant_sees_its_own() -> None:
    """A tenant's key sees its tenant, whatever it asks for, disputed accounts included; an admin sees all."""
    client = client_of(keys=keyed())
    for extra in ({}, {"tenant": "ops"}, {"project_ids": "ops"}, {"tenants[]": "ops"}):
        _, answer = await get(client, KEYS["acme"], by=["tenant"], **extra)
        assert [(row["tenant"], row["requests"]) for row in answer["rows"]] == [("acme", 3)]
        assert answer["total"]["requests"] == 3
        assert [found["request_id"] for found in answer["disputed"]] == ["r4"]
    _, answer = await get(client, KEYS["ops"], by=["tenant"])
    assert [(row["tenant"], row["requests"]) for row in answer["rows"]] == [("acme", 3), ("ops", 1)]


async def test_tenant_that_an_admin_asks_for() -> None:
    """An admin sees all tenants, or those of `tenant`, in rows, total, disputed accounts and export."""
    client = client_of(keys=keyed())
    _, answer = await get(client, KEYS["ops"], by=["tenant"], tenant="acme")
    assert [(row["tenant"], row["requests"]) for row in answer["rows"]] == [("acme", 3)]
    assert (answer["total"]["requests"], [found["request_id"] for found in answer["disputed"]]) == (3, ["r4"])
    _, answer = await get(client, KEYS["ops"], by=["tenant"], tenant=["ops", "nobody"])
    assert [row["tenant"] for row in answer["rows"]] == ["ops"]
    _, answer = await get(client, KEYS["ops"], tenant="nobody")
    assert answer["total"]["requests"] == 0


async def test_key_names() -> None:
    """A key learns the names of its tenant's keys, an admin those of all; ids that are not known have none."""
    client = client_of(keys=keyed())
    path = "/ui/key-names?id=id-acme&id=id-ops&id=id-gone"
    assert (await client.get(path))[0].status == 401
    _, answer = await client.get(path, {"x-api-key": KEYS["acme"]})
    assert answer == {"names": {"id-acme": "acme's"}}
    _, answer = await client.get(path, {"x-api-key": KEYS["ops"]})
    assert answer == {"names": {"id-acme": "acme's", "id-ops": "ops's"}}
    assert (await client.get("/ui/key-names", {"x-api-key": KEYS["ops"]}))[1] == {"names": {}}
    assert (await client_of().get(path))[1] == {"names": {}}
    many = "&".join(f"id={number}" for number in range(501))
    exchange, answer = await client.get(f"/ui/key-names?{many}", {"x-api-key": KEYS["ops"]})
    assert (exchange.status, answer["error"]["param"]) == (400, "id")


async def test_cost(tmp_path: Path) -> None:
    """Each request costs what its model cost when it ended; a model without a price is named and has no cost."""
    _, answer = await get(client_of(prices=prices_in(tmp_path)), by=["tenant"])
    # 52 uncached, 48 cached and 10 completion tokens
    old = (52 * Decimal("0.5") + 48 * Decimal("0.05") + 10 * Decimal("1.5")) / 1_000_000
    new = (100 + 10 * Decimal(2)) / 1_000_000
    assert answer["rows"][0]["cost"] == {"EUR": f"{round(old, 6)}", "USD": f"{new}"}
    assert answer["rows"][0]["unpriced_models"] == ["=big"]
    assert answer["rows"][0]["requests"] == 3
    # rounded once: twice 0.0000434 is 0.000087, not twice 0.000043
    assert (answer["rows"][1]["cost"], answer["total"]["cost"]["EUR"]) == ({"EUR": "0.000043"}, "0.000087")
    assert answer["has_prices"]


async def test_tiers(tmp_path: Path) -> None:
    """Rows, total and export have the cached tokens of each tier, which add up to the cached ones, and their cost."""
    tiers = {"device": 16, "host": 8, "disk": 16, "remote": 6}
    source = BookSource([record_at(60, "r1", cached_by_tier=tiers | {"unattributed": 2}), record_at(61, "r2")])
    entry = PRICES.split("[[prices]]")[1].replace("output = 1.5", "output = 0\ncached_input_disk = 100\n")
    path = tmp_path / "prices.toml"
    path.write_text(f"[[prices]]{entry}")
    client = client_of(source=source, prices=read_prices(path))
    _, answer = await get(client)
    (row,) = answer["rows"]
    named = {f"cached_{tier}_tokens": row[f"cached_{tier}_tokens"] for tier in (*tiers, "unattributed")}
    assert sum(named.values()) == row["cached_tokens"] == 96
    assert [named[f"cached_{tier}_tokens"] for tier in ("host", "disk", "remote", "unattributed")] == [8, 16, 6, 2]
    assert {name: answer["total"][name] for name in named} == named
    cost = (104 * Decimal("0.5") + 80 * Decimal("0.05") + 16 * 100) / 1_000_000
    assert answer["total"]["cost"] == {"EUR": f"{cost}"}
    async with client.open("GET", f"/ui/usage?{urlencode({**RANGE, 'format': 'csv'})}") as exchange:
        await exchange.wait_started()
        (exported,) = csv.DictReader(io.StringIO((await exchange.read()).decode()))
    assert {name: int(exported[name]) for name in named} == named


async def test_export(tmp_path: Path) -> None:
    """The export has the same rows, a column for each currency, and no cell that a spreadsheet would compute."""
    client = client_of(prices=prices_in(tmp_path))
    query = urlencode({**RANGE, "by": ["model"], "bucket": "1d", "format": "csv"}, doseq=True)
    async with client.open("GET", f"/ui/usage?{query}") as exchange:
        await exchange.wait_started()
        rows = list(csv.DictReader(io.StringIO((await exchange.read()).decode())))
    assert exchange.headers["content-type"] == "text/csv; charset=utf-8"
    assert [(row["start"], row["model"], row["requests"]) for row in rows] == [
        ("2025-06-01T00:00:00Z", "'=big", "1"),
        ("2025-06-01T00:00:00Z", "demo", "2"),
        ("2025-06-02T00:00:00Z", "demo", "1"),
    ]
    assert [(row["cost_EUR"], row["cost_USD"]) for row in rows] == [("", ""), ("0.000087", ""), ("", "0.00012")]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"since": "yesterday"}, "since"),
        ({"until": MIDNIGHT}, "until"),
        ({"by": "key_id"}, "by"),
        ({"bucket": "1s"}, "bucket"),
        ({"bucket": "1m"}, "bucket"),
        ({"format": "xml"}, "format"),
        ({"tenant": ["acme", ""]}, "tenant"),
    ],
)
async def test_refusals(parameters: dict[str, Any], param: str) -> None:
    """A wrong parameter is named, and so is a bucket too narrow for the range."""
    exchange, answer = await get(client_of(), **parameters)
    assert (exchange.status, answer["error"]["param"]) == (400, param)


async def test_number_of_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with too many rows is refused, with a hint."""
    monkeypatch.setattr(table_report, "MAX_LINES", 2)
    exchange, answer = await get(client_of(), bucket="1h")
    assert (exchange.status, answer["error"]["code"], answer["error"]["param"]) == (400, "too_many_rows", "bucket")
    exchange, _ = await get(client_of(), bucket="1d")
    assert exchange.status == 200
