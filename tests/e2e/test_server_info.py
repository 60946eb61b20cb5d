"""What a server reports about sizes, threads and determinism, and how it exits if it cannot serve a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, eventually, run_quipu, serve_command, serving
from tests.e2e.spare_processes import STARTS_ANEW
from tests.kernel_markers import needs_kernels
from tests.kernels.checkpoints.broken_checkpoints import BREAKS, change_config
from tests.tiny import TINY

FAST_BREAK = "NaN in a matrix"
BLOCK_BYTES = 2 * 4 * 2 * 16 * 32 * 2
"""The tiny model's: keys and values, layers, heads, slots, elements, bytes."""


def server_info(server: Server) -> Any:
    return server.get("/server_info").json()


@needs_kernels
def test_sized_from_bytes(tmp_path: Path) -> None:
    """`--kv-cache-memory` sets the number of blocks, as /server_info, metrics, log and errors report it."""
    flags = ["--kv-cache-memory", "2MiB", "--determinism", "fast", "--threads", "1", "--log-level", "debug"]
    with serving(tmp_path / "sized", *flags) as server:
        info = server_info(server)
        num_blocks = (2 << 20) // BLOCK_BYTES
        num_tokens = (num_blocks - 1) * 16
        assert info["kv_cache"] == {
            "num_blocks": num_blocks,
            "block_size": 16,
            "num_bytes": num_blocks * BLOCK_BYTES,
            "num_tokens": num_tokens,
            "max_concurrency": 1.0,
        }
        # the context length is limited by the cache
        assert info["max_model_len"] == num_tokens < 16_384
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] == num_tokens
        engine = info["engine"]
        assert (engine["backend"], engine["num_threads"], engine["dtype"]) == ("cpu", 1, "bfloat16")
        assert engine["instruction_set"]
        assert engine["library"] is None
        assert engine["weights_bytes"] > (TINY / "model.safetensors").stat().st_size * 0.99
        # this backend has nothing faster than strict, and reports what it runs
        assert (engine["determinism"], info["settings"]["determinism"]) == ("strict", "fast")
        (ready,) = eventually(lambda: server.events("engine.ready"), "it is logged")
        assert {name: ready[name] for name in engine} == engine
        assert (ready["num_tokens"], ready["max_concurrency"]) == (num_tokens, 1.0)
        assert server.metrics()['kv_blocks{state="free"}'] == num_blocks - 1
        refused = server.complete(list(range(300, 300 + num_tokens)), 8)
        assert refused.status_code == 400 and str(num_tokens) in refused.json()["error"]["message"]
        answer = server.complete(list(range(300, 340)), 8).json()["choices"]
        server.wait_at_rest()
        # the next engine gets the same sizes
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: len(server.events("engine.ready")) == 2, "another engine is ready")
        again = server_info(server)
        assert (again["incarnation"], again["kv_cache"], again["engine"]) == (2, info["kv_cache"], engine)
        assert server.complete(list(range(300, 340)), 8).json()["choices"] == answer
        server.wait_at_rest()


@needs_kernels
def test_kv_cache_in_8_bits(tmp_path: Path) -> None:
    """An int8 cache has nearly twice the blocks in the same memory, says so, and a cached prefix changes nothing."""
    with serving(tmp_path / "int8", "--kv-cache-memory", "2MiB", "--kv-cache-dtype", "int8") as server:
        info = server_info(server)
        block_bytes = 2 * 4 * 2 * 16 * (32 + 4)
        num_blocks = (2 << 20) // block_bytes
        assert (info["kv_cache"]["num_blocks"], info["kv_cache"]["num_bytes"]) == (num_blocks, num_blocks * block_bytes)
        assert num_blocks / ((2 << 20) // BLOCK_BYTES) > 1.75
        engine = info["engine"]
        assert (engine["dtype"], engine["kv_cache_dtype"], info["settings"]["kv_cache_dtype"]) == (
            "bfloat16",
            "int8",
            "int8",
        )
        (ready,) = eventually(lambda: server.events("engine.ready"), "it is logged")
        assert ready["kv_cache_dtype"] == "int8"
        cold, warm = (server.complete(list(range(300, 400)), 8).json() for _ in range(2))
        assert cold["choices"] == warm["choices"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 90
        server.wait_at_rest()


@needs_kernels
@pytest.mark.slow
def test_sized_by_profile_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpu-memory-utilization` accounts for weights and the largest pass; an affinity of one CPU means one thread."""
    model = wide_model(tmp_path / "model")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        total = int((Path("/proc/meminfo").read_text().split())[1]) << 10
        sizes = ["--gpu-memory-utilization", f"{2e9 / total:.6f}", "--max-model-len", "512"]
        with serving(tmp_path / "masked", str(model), "--load-format", "dummy", *sizes) as server:
            info = server_info(server)
            assert info["engine"]["num_threads"] == 1
            assert info["engine"]["workspace_bytes"] > 256 * 4096 * 4, "at least the logits of 256 rows"
            held = info["engine"]["weights_bytes"] + info["engine"]["workspace_bytes"]
            assert 1e9 < info["kv_cache"]["num_bytes"] < 2e9 - held
            assert server.complete(list(range(300, 340)), 8, model="model").status_code == 200
    finally:
        os.sched_setaffinity(0, mask)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [(["--threads", "2"], "1", 2), ([], "2", 2), ([], None, len(os.sched_getaffinity(0)))],
)
def test_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], environment: str | None, expected: int
) -> None:
    """The flag has priority, then OMP_NUM_THREADS, then the CPU affinity."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(STARTS_ANEW, "1")
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    model = wide_model(tmp_path / "model")
    with serving(tmp_path / "there", str(model), "--load-format", "dummy", "--num-blocks", "40", *flags) as server:
        assert server_info(server)["engine"]["num_threads"] == expected


def wide_model(folder: Path) -> Path:
    """Copy the tiny model's files with a config wide enough for several threads."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    change_config(folder, hidden_size=512)
    return folder


def refused(folder: Path, *arguments: str) -> str:
    """Start a server that cannot serve and return its one-line error."""
    ended = run_quipu(*serve_command(*arguments), "--port", "0", folder=folder)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if not line.startswith("{"))
    assert line.startswith("quipu: ")
    return line


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == FAST_BREAK else pytest.mark.slow) for way in BREAKS]
)
def test_broken_checkpoint(tmp_path: Path, way: str) -> None:
    """The server exits with one line that names the tensor, without a traceback or a retry."""
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    BREAKS[way].spoil(model)
    assert re.search(BREAKS[way].named, refused(tmp_path, str(model)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--executor", "cpu", "--dtype", "float16"], "dtype float16 is neither bfloat16 nor float32"),
        (
            ["--executor", "cpu", "--kv-cache-dtype", "float16"],
            "kv_cache_dtype float16 is none of bfloat16, float32 and int8",
        ),
        (
            ["--kv-cache-memory", "1MiB", "--max-model-len", "4096"],
            "needs 4.02MiB of KV cache, and --kv-cache-memory 1.00MiB",
        ),
        (["--kv-cache-memory", "900TiB"], "of memory is available"),
    ],
)
@needs_kernels
@pytest.mark.slow
def test_refused_settings(tmp_path: Path, flags: list[str], named: str) -> None:
    """Settings that the machine or the kernels do not support are rejected by name."""
    assert named in refused(tmp_path, *flags)


@needs_kernels
@pytest.mark.slow
def test_float16_falls_back(tmp_path: Path) -> None:
    """By default a server runs float16 on the reference executor, and logs one warning."""
    with serving(tmp_path / "half", "--dtype", "float16", "--num-blocks", "100") as server:
        engine = server_info(server)["engine"]
        assert (engine["backend"], engine["dtype"]) == ("reference", "float16")
        warnings = [json.loads(line) for line in server.log_text.splitlines() if '"warning"' in line]
        assert sum("float16" in line["event"] for line in warnings) == 1
        assert server.complete(list(range(300, 340)), 8).status_code == 200
