"""`quipu models` lists the hub's cache, and says of each model whether it can be served here, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quipu.web.cli.cli import main
from quipu.web.cli.models_command import Model, models_in
from tests.tiny import TINY

GB = 10**9


def accept(config: dict[str, Any]) -> None:
    if config.get("architectures") != ["Known"]:
        raise ValueError("not supported")


def checkpoint(folder: Path, num_bytes: int = 10, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Known"], **config}))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return folder


@pytest.mark.parametrize(
    ("config", "num_bytes", "expected"),
    [
        ({"dtype": "bfloat16"}, 3 * GB, ("bfloat16", "")),
        ({"quantization_config": {"quant_method": "awq"}}, 10, ("awq", "")),
        ({"torch_dtype": "float16"}, 8 * GB, ("float16", "it needs 9.1 GB, 8.0 are available")),
        ({"architectures": ["Other"]}, 10, ("safetensors", "not supported")),
        ({}, 0, ("float32", "its weights are not here")),
    ],
)
def test_verdicts(tmp_path: Path, config: dict[str, Any], num_bytes: int, expected: tuple[str, str]) -> None:
    folder = checkpoint(tmp_path / "model", num_bytes, **config)
    assert list(models_in("a/b", folder, 8 * GB, accept)) == [Model("a/b", expected[0], num_bytes, expected[1])]


def test_files_by_type(tmp_path: Path) -> None:
    """Parts of one file count together; encoders of images are no models."""
    names = ("a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf", "a.q8_0.gguf", "mmproj-a-F16.gguf")
    for name in names:
        (tmp_path / name).write_bytes(b"1234")
    found = {model.name: model.num_bytes for model in models_in("a/b", tmp_path, GB * 8, accept)}
    assert found == {"a/b:Q4_K_M": 8, "a/b:Q8_0": 4}


def test_cache_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cached; then a model that some family refuses by name, beside a folder that can be served."""
    cache = tmp_path / "hub"
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(cache))
    assert main(["models"]) == 0
    assert "quipu serve demo" in capsys.readouterr().out
    repository = cache / "models--owner--name"
    checkpoint(repository / "snapshots" / "abc", architectures=["NoSuchForCausalLM"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert main(["models", str(TINY), "--json"]) == 0
    refused, served = sorted(json.loads(capsys.readouterr().out), key=lambda model: str(model["name"] == str(TINY)))
    assert refused["name"] == "owner/name" and "NoSuchForCausalLM" in refused["why_not"]
    assert served["why_not"] == "" and served["num_bytes"] > 0
