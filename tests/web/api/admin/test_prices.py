"""Price lists: which entries are valid, and that amounts are exact until they are shown."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.ledger.reading import Query, Sum
from quipu.web.api.admin.cost_report import columns, price_parts
from quipu.web.api.admin.prices import (
    MAX_CHANGES,
    Price,
    PriceError,
    PriceList,
    add_amounts,
    read_prices,
    rounded,
)

ENTRY = 'model = "demo"\ncurrency = "EUR"\ninput = 0.1\noutput = 0.3\n'


def read(folder: Path, *entries: str) -> PriceList:
    path = folder / "prices.toml"
    path.write_text("".join(f"[[prices]]\n{entry}\n" for entry in entries))
    return read_prices(path)


def price_of(prices: PriceList, moment: float = 0, model: str = "demo") -> Price:
    price = prices.at(model, moment)
    assert price is not None
    return price


def test_defaults_and_decimals(tmp_path: Path) -> None:
    """A price is the decimal number that was written; cached and written tokens without one cost as input."""
    price = price_of(read(tmp_path, ENTRY + "cached_input = 0.01\n"))
    assert (price.input, price.cached_input, price.output) == (Decimal("0.1"), Decimal("0.01"), Decimal("0.3"))
    assert price.cache_write_5m == price.cache_write_1h == price.input
    assert price.cached_input_host == price.cached_input_disk == price.cached_input_remote == price.cached_input


def test_tiers_have_their_prices(tmp_path: Path) -> None:
    """Cached tokens cost what their tier does: a tier without a price of its own, or no known tier, as cached input."""
    entry = 'model = "demo"\ncurrency = "EUR"\ninput = 1\ncached_input = 10\ncached_input_disk = 100\noutput = 0\n'
    tiers = {"cached_device_tokens": 2, "cached_host_tokens": 3, "cached_disk_tokens": 5, "cached_remote_tokens": 7}
    one = Sum(prompt_tokens=41, cached_tokens=28, cached_unattributed_tokens=11, **tiers)
    price = price_of(read(tmp_path, entry))
    assert price.cost(one) == Decimal(13 * 1 + (2 + 3 + 7 + 11) * 10 + 5 * 100) / 1_000_000
    price = price_of(read(tmp_path, entry + "cached_input_host = 1000\ncached_input_remote = 10000\n"))
    assert price.cost(one) == Decimal(13 * 1 + (2 + 11) * 10 + 3 * 1000 + 5 * 100 + 7 * 10_000) / 1_000_000


def test_tiers_are_priced_within_the_cached_tokens(tmp_path: Path) -> None:
    """Where every tier costs the same, the tiers make no difference, whatever share of the tokens each has."""
    price = price_of(read(tmp_path, ENTRY + "cached_input = 0.01\n"))
    costs = {
        price.cost(Sum(prompt_tokens=100, cached_tokens=64, **{f"cached_{tier}_tokens": 48}))
        for tier in ("device", "host", "disk", "remote", "unattributed")
    }
    assert costs == {price.cost(Sum(prompt_tokens=100, cached_tokens=64))}


def test_each_kind_of_token_has_its_price(tmp_path: Path) -> None:
    """Every prompt token is priced once: cached, written for five minutes, for an hour, or neither."""
    entry = 'model = "demo"\ncurrency = "EUR"\ninput = 1\ncached_input = 10\ncache_write_5m = 100\n'
    price = price_of(read(tmp_path, entry + "cache_write_1h = 1000\noutput = 10000\n"))
    one = Sum(
        prompt_tokens=31,
        cached_tokens=5,
        created_5m_tokens=7,
        created_1h_tokens=11,
        cache_write_tokens=20,
        completion_tokens=13,
    )
    assert price.cost(one) == Decimal(8 * 1 + 5 * 10 + 7 * 100 + 11 * 1000 + 13 * 10_000) / 1_000_000


def test_prices_change(tmp_path: Path) -> None:
    """A later entry applies from its `from` on, and `periods` cuts a range where a price changes."""
    later = ENTRY.replace("0.1", "0.2") + "from = 1970-01-02\n"
    latest = ENTRY.replace("0.1", "0.4") + "from = 1970-01-03T01:00:00+01:00\n"
    prices = read(tmp_path, later, ENTRY, latest)
    found = [str(price_of(prices, moment).input) for moment in (0, 86_399, 86_400, 172_799, 172_800)]
    assert found == ["0.1", "0.1", "0.2", "0.2", "0.4"]
    assert prices.periods(0, 200_000) == [(0, 86_400.0), (86_400.0, 172_800.0), (172_800.0, 200_000)]
    assert prices.periods(86_400, 172_800) == [(86_400, 172_800)]
    assert prices.periods(100_000, None) == [(100_000, 172_800.0), (172_800.0, None)]
    assert prices.at("another", 0) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one entry"),
        ("[[price]]\nmodel = 1", "unknown field `price`"),
        ("prices = 3", "at least one entry"),
        ("prices = [3]", "prices[0] must be a table"),
        ("[[prices]]\nmodel = 'demo'", "prices[0]: `currency` is required"),
        (f"[[prices]]\n{ENTRY}inputs = 3", "prices[0]: unknown field `inputs`"),
        (f"[[prices]]\n{ENTRY.replace('0.1', '-1')}", "prices[0]: `input` must be between 0"),
        (f"[[prices]]\n{ENTRY.replace('0.1', 'nan')}", "prices[0]: `input` must be between 0"),
        (f"[[prices]]\n{ENTRY.replace('0.1', 'true')}", "prices[0]: `input` must be a number"),
        (f"[[prices]]\n{ENTRY.replace('0.1', '1e-30')}", "prices[0]: `input` must have at most"),
        (f"[[prices]]\n{ENTRY.replace('0.1', '1e9999999999999999999')}", "prices"),
        (f"[[prices]]\n{ENTRY.replace('demo', '')}", "prices[0]: `model` must be 1 to"),
        (f"[[prices]]\n{ENTRY}cached_input_device = 3", "prices[0]: unknown field `cached_input_device`"),
        (f"[[prices]]\n{ENTRY}cached_input_disk = -1", "prices[0]: `cached_input_disk` must be between 0"),
        (f"[[prices]]\n{ENTRY}from = 3", "prices[0]: `from` must be a date"),
        (f"[[prices]]\n{ENTRY}[[prices]]\n{ENTRY}", "two prices of model 'demo' have the same `from`"),
        ("[[prices", "prices.toml"),
        (f"{'a.' * 2000}b = 1", "nested too deeply"),
    ],
)
def test_wrong_lists(tmp_path: Path, text: str, message: str) -> None:
    """The error about an invalid list names the entry and the field."""
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(PriceError) as refused:
        read_prices(path)
    assert message in str(refused.value)


def test_unreadable_list(tmp_path: Path) -> None:
    """A file that is missing or not text is named."""
    with pytest.raises(PriceError, match="cannot be read"):
        read_prices(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PriceError, match="not UTF-8"):
        read_prices(tmp_path / "binary.toml")


def test_number_of_changes_is_bounded(tmp_path: Path) -> None:
    """The number of changes is limited, since a report queries the ledger once for each of them."""
    entries = [f"{ENTRY}from = 2026-01-01T00:00:00.{number:03}Z" for number in range(MAX_CHANGES + 1)]
    assert len(read(tmp_path, *entries[1:]).periods(None, None)) == MAX_CHANGES + 1
    with pytest.raises(PriceError, match="different times"):
        read(tmp_path, *entries)


DECIMALS = st.decimals(0, 10**6, places=6)


@given(st.lists(st.tuples(st.integers(0, 10**12), DECIMALS), max_size=20))
def test_sums_are_exact(parts: list[tuple[int, Decimal]]) -> None:
    """Amounts add up as fractions do: however many, only what is shown is rounded."""
    amounts, expected = [], 0
    for tokens, per_million in parts:
        prices = dict.fromkeys(("input", "cached_input", "cache_write_5m", "cache_write_1h"), per_million)
        price = Price(model="m", currency="EUR", output=Decimal(0), **prices)
        amounts.append({"EUR": price.cost(Sum(prompt_tokens=tokens))})
        expected += tokens * int(per_million.scaleb(6))
    assert add_amounts(amounts).get("EUR", Decimal(0)) * 10**12 == expected


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "0.00"),
        ("1", "1.00"),
        ("0.1", "0.10"),
        ("0.123456", "0.123456"),
        ("0.0000005", "0.00"),
        ("0.0000015", "0.000002"),
        ("1234567890123456789.1234567", "1234567890123456789.123457"),
    ],
)
def test_rounding(amount: str, shown: str) -> None:
    """Amounts are shown with two to six places, halves rounded to even."""
    assert rounded(Decimal(amount)) == shown


def test_adapters_cost_what_their_model_costs(tmp_path: Path) -> None:
    """An adapter's own price applies if it has one, else its model's; without either it is named."""
    entry = 'model = "{}"\ncurrency = "USD"\ninput = {}\noutput = 0\n'
    prices = read(tmp_path, entry.format("demo", 1), entry.format("own", 3))
    grouped = columns(["tenant"], prices)
    sums = [
        Sum(group=dict(zip(grouped, ("acme", model, parent, "standard"), strict=True)), prompt_tokens=1_000_000)
        for model, parent in (("demo", None), ("one", "demo"), ("own", "demo"), ("stray", "gone"))
    ]
    (line,) = price_parts([(Query(), sums)], ["tenant"], prices)
    assert line.cost == {"USD": "5.00"}
    assert line.unpriced_models == ("stray",)


def test_lines_of_batches_have_their_prices(tmp_path: Path) -> None:
    """Tokens of lines cost what the `batch` table says, others as before; without one they cost the same."""
    apart = read(tmp_path, ENTRY + "batch.input = 0.05\nbatch.output = 0.2\nbatch.cached_input = 0\n")
    for prices, expected in ((apart, Decimal("0.25")), (read(tmp_path, ENTRY), Decimal("0.4"))):
        assert "service_tier" in columns(["model"], prices)
        for tier, amount in (("standard", Decimal("0.4")), ("batch", expected)):
            group = {"model": "demo", "parent": None, "service_tier": tier}
            one = Sum(group=group, prompt_tokens=1_000_000, completion_tokens=1_000_000)
            (line,) = price_parts([(Query(), [one])], ["model"], prices)
            assert line.amounts == {"EUR": amount}


def test_batch_prices_are_checked(tmp_path: Path) -> None:
    """An error in the `batch` table names it."""
    cases = {"batch = 3\n": "batch must be a table", "batch.input = 1\n": "batch: `output` is required"}
    for entry, message in cases.items():
        with pytest.raises(PriceError, match=message):
            read(tmp_path, ENTRY + entry)
