"""Values of flags that `vllm serve` has, too: they mean the same here, or the error says what to do instead."""

from __future__ import annotations

import json

import pytest

from quipu.actors.shared.checkpoint import DEMO_ADAPTER_NAME
from quipu.web.cli.cli import main, make_parser
from quipu.web.cli.settings import resolve_config
from tests.tiny import TINY


def parsed(*flags: str) -> object:
    return make_parser().parse_args(["serve", str(TINY), *flags])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2k", 2000),
        ("2K", 2048),
        ("2.5k", 2500),
        ("1.001k", 1001),
        ("1m", 10**6),
        ("1M", 1 << 20),
        ("1g", 10**9),
        ("2048", 2048),
    ],
)
@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-batched-tokens"])
def test_counts(flag: str, text: str, number: int) -> None:
    """Lower-case letters are powers of 1000, capitals of 1024."""
    assert vars(parsed(flag, text))[flag.removeprefix("--").replace("-", "_")] == number


@pytest.mark.parametrize("text", ["2.5K", "2kk", "k", "2 k", "2kB"])
def test_bad_counts(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What vLLM does not take is an error."""
    with pytest.raises(SystemExit):
        parsed("--max-model-len", text)
    assert "must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_length_of_the_model(text: str) -> None:
    """`auto` and -1 are what is resolved without the flag."""
    given, default = (
        resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
        for flags in (["--max-model-len", text], [])
    )
    assert given[0].engine.max_model_len == default[0].engine.max_model_len
    assert given[0].engine.may_shorten


@pytest.mark.parametrize(("text", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes(text: str, dtype: str) -> None:
    """Both names of a type are read."""
    assert vars(parsed("--dtype", text))["dtype"] == dtype


def test_adapters_as_objects() -> None:
    """An adapter may be an object, too, in any place of the list."""
    given = json.dumps({"name": "b", "path": "/folder", "base_model_name": "x"})
    modules = vars(parsed("--lora-modules", f"a={DEMO_ADAPTER_NAME}", given))["lora_modules"]
    assert [(name, str(folder)) for name, folder in modules][1] == ("b", "/folder") and len(modules) == 2


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--lora-modules", '{"name":"b"}', "NAME=FOLDER"),
        ("--lora-modules", '{"name":"b","path":"/f","load_inplace":true}', "unknown field"),
        ("--lora-modules", '{"name":"b b","path":"/f"}', "where NAME has"),
        ("--quantization", "awq", "as its config.json says"),
        ("--load-format", "safetensors", "`auto` reads safetensors"),
        ("--load-format", "tensorizer", "safetensors and GGUF"),
        ("--kv-cache-dtype", "fp8_e4m3", "int8"),
        ("--log-level", "INFO", "did you mean info?"),
    ],
)
def test_other_values(flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a value that is not to be had, the error says what to do instead."""
    with pytest.raises(SystemExit):
        main(["serve", str(TINY), flag, value])
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
