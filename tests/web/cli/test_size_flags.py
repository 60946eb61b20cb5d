"""Size units on the command line, and the flags for KV cache memory, threads and determinism."""

from __future__ import annotations

import pytest

from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli.cli import main, make_parser
from quipu.web.cli.settings import resolve_config
from quipu.web.cli.upstream_flags import read_upstreams
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("4GB", 4 * 10**9),
        ("4g", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("64K", 64 << 10),
        ("64kB", 64_000),
        ("2 TiB", 2 << 40),
        ("4294967296", 4 << 30),
        ("100B", 100),
        ("9007199254740993", (1 << 53) + 1),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
@pytest.mark.parametrize("flag", ["--kv-cache-memory", "--kv-cache-memory-bytes"])
def test_sizes(text: str, num_bytes: int, flag: str) -> None:
    """Powers of 1024 and of 1000 are accepted, by quipu's flag and vLLM's; the engine computes the number of blocks."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), flag, text]))
    assert config.engine.kv_cache_bytes == info.settings["kv_cache_memory"] == num_bytes
    assert config.engine.num_blocks is info.num_blocks is None


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        *(("--kv-cache-memory", text) for text in ("0", "-4GiB", "4XB", "GiB", "4 4", "", "4iB", "1e9")),
        *(("--kv-cache-memory", text) for text in (str(1 << 63), "8388608T", "9" * 400, "9" * 5000 + "GiB")),
        *(("--kv-host-memory", text) for text in ("0", "-4GiB", "4XB", "")),
        *(("--gpu-memory-utilization", text) for text in ("0", "1.1", "-1", "nan", "much")),
        ("--determinism", "loose"),
        ("--threads", "0"),
    ],
)
def test_invalid_values(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flag."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", f"{flag}={text}"])
    assert flag in capsys.readouterr().err


def test_host_memory() -> None:
    """`--kv-host-memory` takes a size, reaches the engine and is shown; without it there is no host tier."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), "--kv-host-memory", "1.5GiB"]))
    assert config.engine.kv_host_memory == info.settings["kv_host_memory"] == 3 << 29
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY)]))
    assert config.engine.kv_host_memory is info.settings["kv_host_memory"] is None


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--no-enable-prefix-caching"], "--kv-host-memory needs --enable-prefix-caching"),
        (["--upstream", "http://localhost:1"], "--kv-host-memory is for engines"),
    ],
)
def test_host_memory_needs_a_cache(flags: list[str], what: str) -> None:
    """A host tier without a prefix cache, or without an engine, is refused by the flag's name."""
    arguments = make_parser().parse_args(["serve", str(TINY), "--kv-host-memory", "1GiB", *flags])
    with pytest.raises(CheckpointError, match=what):
        resolve_config(arguments, read_upstreams(arguments, {}))


def test_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown flag is named in one line, with the command that it was given to."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", "--zork", "1"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("quipu serve: error: unknown flag --zork") and told.count("\n") == 1


def test_served_names() -> None:
    """A name that is given twice is one name."""
    _, info = resolve_config(make_parser().parse_args(["serve", str(TINY), "--served-model-name", "a", "b", "a"]))
    assert info.model_names == ("a", "b")


def test_values_reach_the_engine() -> None:
    """Utilization, mode and threads reach the engine, and so does vLLM's flag for the number of blocks."""
    flags = ["--gpu-memory-utilization", "0.5", "--determinism", "strict", "--threads", "3"]
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert (config.engine.memory_utilization, config.engine.determinism, config.engine.num_threads) == (
        0.5,
        "strict",
        3,
    )
    shown = {name: info.settings[name] for name in ("gpu_memory_utilization", "determinism", "threads")}
    assert shown == {"gpu_memory_utilization": 0.5, "determinism": "strict", "threads": 3}
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), "--num-gpu-blocks-override", "40"]))
    assert config.engine.num_blocks == info.num_blocks == 40


@pytest.mark.parametrize(("flags", "may"), [([], True), (["--max-model-len", "1024"], False)])
def test_only_a_default_length_may_be_shortened(flags: list[str], may: bool) -> None:
    """A configured length is kept or refused, never shortened."""
    config, _ = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.may_shorten is may
