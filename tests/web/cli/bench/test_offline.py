"""`quipu bench latency` and `quipu bench throughput`: flags, numbers, and error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from quipu.web.cli.bench.offline import describe_throughput, summarize_latencies
from quipu.web.cli.bench.offline_arguments import parse_offline
from quipu.web.cli.cli import main as quipu
from quipu.web.telemetry import logs
from tests.forked_children import forked_children

pytestmark = pytest.mark.timeout(600)  # each command has an engine

FAKE = ("--executor", "fake", "--fake-step-seconds", "0", "--disable-tqdm")


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    """Have engines and what they need forked by the launcher."""
    with forked_children():
        yield


@pytest.fixture(autouse=True)
def keep_logging_setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the command from configuring logging for the whole process: later tests run after its stderr is closed."""
    monkeypatch.setattr(logs, "configure", lambda level: None)
    structlog.configure(processors=[LogCapture()], cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()


def test_flags_of_both_kinds() -> None:
    """Unknown flags are passed on to `quipu serve`; datasets are those of `quipu bench serve`."""
    parsed = parse_offline(
        ["latency", "--model", "demo", "--input-len", "7", "--max-num-seqs", "3", "--dtype", "float32"]
    )
    assert (parsed.bench.input_len, parsed.bench.output_len, parsed.bench.batch_size) == (7, 128, 8)
    assert (parsed.serve.model, parsed.serve.max_num_seqs, parsed.serve.dtype) == ("demo", 3, "float32")
    parsed = parse_offline(["throughput", "--input-len", "9", "--output-len", "4"])
    assert (parsed.bench.random_input_len, parsed.bench.random_output_len) == (9, 4)
    parsed = parse_offline(["throughput", "--dataset", "rows.jsonl"])
    assert (parsed.bench.dataset_name, parsed.bench.dataset_path) == ("custom", Path("rows.jsonl"))
    parsed = parse_offline(["throughput"])
    assert (parsed.bench.dataset_name, parsed.bench.random_input_len, parsed.bench.random_output_len) == (
        "random",
        1024,
        128,
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["latency", "--input-length", "5"], "--input-length"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["throughput", "--dtype", "float8"], "--dtype"),
        (["throughput", "--dataset-name", "trace"], "--dataset-path"),
    ],
)
def test_invalid_flags(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2 and the flag is named."""
    with pytest.raises(SystemExit, match="2"):
        parse_offline(flags)
    assert named in capsys.readouterr().err


def test_latency(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The result is one JSON object with vLLM's names; no batch hit the cache, and every one was timed."""
    flags = (
        "--input-len",
        "40",
        "--output-len",
        "3",
        "--batch-size",
        "5",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    assert (
        quipu(
            [
                "bench",
                "latency",
                *flags,
                "--num-iters-warmup",
                "1",
                *FAKE,
                "--json",
                "--output-json",
                str(tmp_path / "out.json"),
            ]
        )
        == 0
    )
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == ""
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert len(report["latencies"]) == 4
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 4)
    assert report["output_tokens_per_second"] == pytest.approx(15 / report["avg_latency"])
    assert (report["engine"]["executor"], report["engine"]["backend"]) == ("fake", "fake")
    assert report["engine"]["num_blocks"] > 0


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_quick(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--quick` alone, a few short requests are served and the result names the version."""
    assert quipu(["bench", name, "--quick", "--json", *FAKE]) == 0
    assert json.loads(capsys.readouterr().out)["quipu_version"]


def test_latency_in_numbers() -> None:
    """Percentiles are interpolated, as in numpy and vLLM."""
    report = summarize_latencies([4.0, 1.0, 2.0, 3.0], batch_size=2, output_len=5)
    assert report["avg_latency"] == 2.5
    assert report["percentiles"]["50"] == 2.5
    assert report["percentiles"]["99"] == pytest.approx(3.97)
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["output_tokens_per_second"] == 4


def test_throughput_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All chats are sent at once; every request and token is counted, and responses have the requested length."""
    rows = [{"messages": [{"role": "user", "content": f"chat {i} " * 20}], "max_tokens": 2 + i} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--dataset", str(tmp_path / "rows.jsonl"), "--chat", "--json")
    assert quipu(["bench", "throughput", *flags, *FAKE]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["failed"]) == (6, 0)
    assert report["total_output_tokens"] == sum(row["max_tokens"] for row in rows)
    assert report["total_num_tokens"] == report["total_input_tokens"] + report["total_output_tokens"]
    assert report["tokens_per_second"] == pytest.approx(report["total_num_tokens"] / report["elapsed_time"])
    assert 0 < report["mean_ttft_ms"] <= report["p99_ttft_ms"] <= report["elapsed_time"] * 1000


def test_requests_that_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that do not fit are reported with the reason, by both commands, and the exit code is 1."""
    short = ("--max-model-len", "64", "--input-len", "60", "--output-len", "30")
    assert quipu(["bench", "throughput", "--num-prompts", "3", *short, *FAKE]) == 1
    assert "failed: 3 x invalid: This model's maximum context length is 64" in capsys.readouterr().out
    assert quipu(["bench", "latency", *short, *FAKE]) == 1
    assert "maximum context length is 64" in capsys.readouterr().err
    assert quipu(["bench", "latency", "--model", "./nowhere"]) == 2
    assert "./nowhere" in capsys.readouterr().err


def test_unknown_is_not_zero() -> None:
    """A sum with an unknown part is unknown, and so is everything derived from it."""
    summary = {"total_input_tokens": None, "total_output_tokens": 3, "total_token_throughput": None, "duration": 1.0}
    summary |= {"completed": 1, "failed": 1, "skipped": 1, "errors": [], "request_throughput": 1.0}
    report = describe_throughput(summary | {"output_throughput": 3.0})
    assert report["total_num_tokens"] is None
    assert report["failed"] == 2
