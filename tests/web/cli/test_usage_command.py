"""The command `quipu usage`: a table for people, JSON for programs, and clear error messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.ledger.database import sqlite_url
from quipu.actors.messages.counts import Estimate
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.web.cli.cli import main as quipu
from tests.actors.ledger.ledgers import record_of
from tests.web.api.admin.usage_books import DAY, MIDNIGHT, copy_database, drop_records_table, make_database, record_at


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return the default data directory, with an empty database."""
    made = tmp_path / "empty"
    make_database(made)
    return made


def keep(data_dir: Path, records: Iterable[UsageRecord]) -> str:
    return str(copy_database(data_dir, data_dir.with_name("kept"), records))


def usage(*arguments: str) -> int:
    return quipu(["usage", *arguments])


def exit_code_of(*arguments: str) -> int:
    """Return the exit code of a command line that argparse refuses."""
    with pytest.raises(SystemExit) as ended:
        usage(*arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


RECORDS = [
    record_at(60, "r1"),
    record_at(3700, "r2", model="big", key_id=None, completion_tokens=1_000),
    record_at(3800, "r3", tenant="b", cached=Estimate(96), cached_by_tier=None),
    record_at(DAY, "r4", outcome=Outcome.FAILED),
    record_at(DAY + 1, "r5", retry_of="r1"),
    record_at(DAY + 2, "r6", outcome=Outcome.REJECTED),
    record_at(DAY + 3, "r7", outcome=Outcome.FAILED, fault=Fault.ENGINE_DIED),
]
SINCE = ("--since", "2025-06-01")


def test_table(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has one line per group and a total, numbers aligned right, without rejected requests."""
    kept = keep(data_dir, RECORDS)
    assert usage(*SINCE, "--by", "model,api_key", "--data-dir", kept) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model  api_key  requests  input  cached  hit rate  written  output",
        "big    -               1    100      48     48.0%       48   1,000",
        "demo   key-1           5    400     144     48.0%      192      40",
        "total                  6    500     192     48.0%      240   1,040",
        "(96 tokens more were estimated to be cached: not billed as cached)",
        "(of 100 input tokens it is not known how many were cached: they are in no hit rate)",
        "(1 of the requests failed through the server's own fault: their tokens do not count)",
    ]


def test_tiers(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiers below the device that tokens were loaded from have columns of their own; what they cost is included."""
    tiers = {"device": 8, "host": 0, "disk": 32, "remote": 8}
    kept = keep(data_dir, [record_at(60, "r1"), record_at(61, "r2", model="big", cached_by_tier=tiers)])
    prices = data_dir.with_name("prices.toml")
    entry = '[[prices]]\nmodel = "big"\ncurrency = "EUR"\ninput = 0\ncached_input = 0\noutput = 0\n'
    prices.write_text(entry + "cached_input_disk = 1000\ncached_input_remote = 100\n")
    assert usage(*SINCE, "--by", "model", "--data-dir", kept, "--prices", str(prices)) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "model  requests  input  cached  from disk  from remote  hit rate  written  output     EUR",
        "big           1    100      48         32            8     48.0%       48      10  0.0328",
        "demo          1    100      48          0            0     48.0%       48      10       -",
        "total         2    200      96         32            8     48.0%       96      20  0.0328",
    ]


def test_buckets_and_tenants(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each hour in which something closed, in UTC; `--until` is exclusive; `--tenant` narrows."""
    kept = keep(data_dir, RECORDS)
    where = ("--data-dir", kept, *SINCE, "--bucket", "1h")
    assert usage(*where, "--until", "2025-06-02T00:00:00Z", "--by", "tenant") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["2025-06-01", "00:00Z", "acme", "1"],
        ["2025-06-01", "01:00Z", "acme", "1"],
        ["2025-06-01", "01:00Z", "b", "1"],
        ["total", "3", "300", "96"],
    ]
    assert usage(*where, "--tenant", "b", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["bucket"], row["num_requests"]) == (MIDNIGHT + 3600, 1)


def test_json(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has every sum of the ledger, under its own names."""
    kept = keep(data_dir, RECORDS)
    assert usage(*SINCE, "--by", "outcome", "--json", "--data-dir", kept) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["since"], answer["until"]) == (MIDNIGHT, None)
    assert {row["outcome"]: row["num_requests"] for row in answer["rows"]} == {
        "finished": 4,
        "failed": 2,
        "rejected": 1,
    }
    failed = next(row for row in answer["rows"] if row["outcome"] == "failed")
    assert (failed["num_faulted"], failed["prompt_tokens"], failed["computed_tokens"]) == (1, 100, 52)
    finished = next(row for row in answer["rows"] if row["outcome"] == "finished")
    assert (finished["prompt_tokens"], finished["cached_tokens"], finished["estimated_cached_tokens"]) == (400, 144, 96)


def test_retries_collapsed(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default every request counts; with `--retries collapse`, each once with its retries."""
    kept = keep(data_dir, RECORDS)
    for flags, expected in (((), (6, 500)), (("--retries", "count"), (6, 500)), (("--retries", "collapse"), (5, 400))):
        assert usage(*SINCE, "--json", "--data-dir", kept, *flags) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["num_requests"], row["prompt_tokens"]) == expected


def test_no_usage(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without usage the table has no rows, and its hit rate is not a number."""
    assert usage("--data-dir", str(data_dir)) == 0
    assert capsys.readouterr().out.split()[7:] == ["0", "0", "0", "-", "0", "0"]
    assert usage("--data-dir", str(data_dir), "--by", "model") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["total", "0", "0", "0", "-", "0", "0"]


def test_default_range(data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the last 24 hours of `data`, or of the database in the environment."""
    now = time.time()
    kept = keep(data_dir, [record_of("new", closed_at=now - DAY + 60), record_of("old", closed_at=now - DAY - 60)])

    def num(*arguments: str) -> Any:
        assert usage("--json", *arguments) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        return row["num_requests"]

    monkeypatch.chdir(data_dir.parent)
    Path(kept).rename("data")
    assert num() == 1 and num("--since", "2d") == 2 and num("--since", "2d", "--until", "24h") == 1
    url = sqlite_url(data_dir.parent / "data")
    assert num("--ledger-url", url) == 1
    monkeypatch.setenv("QUIPU_LEDGER_URL", url)
    Path("data/ledger").rmdir()
    assert num("--since", "2d") == 2


def test_control_characters_are_not_printed(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in names never reach the terminal."""
    kept = keep(data_dir, [record_at(60, model="a\x1b[2Jb")])
    assert usage(*SINCE, "--by", "model", "--data-dir", kept) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a?[2Jb" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--by", "colour"), "unknown group 'colour' (one of model, api_key, tenant, endpoint, outcome, kind)"),
        (("--by", "model,"), "unknown group ''"),
        (("--since", "a while"), "invalid time"),
        (("--since", "nan"), "1970"),
        (("--since", "1e300"), "1970"),
        (("--bucket", "1w"), "1w"),
        (("--retries", "once"), "once"),
    ],
)
def test_invalid_flags(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid flags are named with what is allowed; exit code 2."""
    assert exit_code_of(*arguments) == 2
    assert message in capsys.readouterr().err


def test_unreadable_ledger(tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No ledger, an empty range, an unavailable or broken database: a message and exit code 2."""
    for arguments, message in (
        (("--data-dir", str(tmp_path / "gone")), "there is no ledger in"),
        (("--data-dir", str(data_dir), "--since", "1h", "--until", "2h"), "--until must be later"),
        (("--ledger-url", "postgresql://nobody@127.0.0.1:1/none"), "cannot read the ledger's database"),
        (("--ledger-url", "mysql://x/y"), "--ledger-url"),
    ):
        assert usage(*arguments) == 2
        output = capsys.readouterr()
        assert message in output.err and output.out == "" and "Traceback" not in output.err
    drop_records_table(data_dir)
    assert usage("--data-dir", str(data_dir)) == 2
    assert "no such table" in capsys.readouterr().err
    (data_dir / "ledger.sqlite3").write_bytes(b"this is no database" * 500)
    assert usage("--data-dir", str(data_dir)) == 2
    assert "database" in capsys.readouterr().err


PRICES = """
[[prices]]
model = "demo"
currency = "EUR"
input = 0.5
cached_input = 0.05
output = 1.5
"""


def test_cost(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With prices the table has a column for each currency and names models without one; so does the JSON."""
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    where = (*SINCE, "--data-dir", keep(data_dir, RECORDS), "--prices", str(prices))
    assert usage(*where, "--by", "model") == 0
    lines = capsys.readouterr().out.splitlines()
    # 400 prompt tokens, 144 of them cached, and 40 completion tokens
    assert [line.split() for line in lines[:4]] == [
        ["model", "requests", "input", "cached", "hit", "rate", "written", "output", "EUR"],
        ["big", "1", "100", "48", "48.0%", "48", "1,000", "-"],
        ["demo", "5", "400", "144", "48.0%", "192", "40", "0.000195"],
        ["total", "6", "500", "192", "48.0%", "240", "1,040", "0.000195"],
    ]
    assert lines[-1] == "(no price, and so no cost: big)"
    assert usage(*where, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["cost"], row["unpriced_models"]) == ({"EUR": "0.000195"}, ["big"])


def test_wrong_prices(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A price list that cannot be used is an error, not a report without cost."""
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES.replace("output", "outputs"))
    assert usage("--data-dir", keep(data_dir, RECORDS), "--prices", str(prices)) == 2
    assert "prices[0]: `output` is required" in capsys.readouterr().err
