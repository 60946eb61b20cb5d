"""OpenVINO GenAI's continuous batching behind the thin server, with its prefix cache.

The model is exported once, next to the checkpoint, with 16-bit weights, or with the library's own 8 or 4 bits if
PEER_FORMAT is int8 or int4. Keys and values have at least the precision of
the weights, while the library's default is 8 bits; `OPENVINO_KV=u8` selects that default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

CACHE_GB = 2
CACHE_TYPES = (("amx_bf16", "bf16"), ("avx512_bf16", "bf16"))
"""Precision of keys and values by processor feature; without these only 32 or 8 bits are supported, not 16."""
FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""Weights of a comparison, and the exporter's word for its closest."""


class OpenVinoEngine:
    gather_s = 0.0

    def __init__(self, model: str) -> None:
        weights = FORMATS[os.environ.get("PEER_FORMAT", "bf16")]
        folder = export(Path(model), weights)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        flags = Path("/proc/cpuinfo").read_text().split()
        kv = os.environ.get("OPENVINO_KV") or next((kind for flag, kind in CACHE_TYPES if flag in flags), "f32")
        properties = {"KV_CACHE_PRECISION": kv, "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        compute = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        self.info = {
            "version": openvino_genai.__version__,
            "weights": weights,
            "weights_bytes": (folder / "openvino_model.bin").stat().st_size,
            "kv": kv,
            "compute": str(compute.to_string()),
            "prefix_cache": True,
        }
        self._open: dict[int, tuple[openvino_genai.py_openvino_genai.GenerationHandle, int]] = {}

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._open[number] = (self._pipeline.add_request(number, tensor, config), max_tokens)

    def step(self) -> list[tuple[int, int, bool]]:
        self._pipeline.step()
        drawn = []
        for number, (handle, num_left) in list(self._open.items()):
            while handle.can_read():
                for output in handle.read().values():
                    for token_id in output.generated_ids:
                        num_left -= 1
                        drawn.append((number, token_id, num_left == 0))
            self._open[number] = (handle, num_left)
            if num_left == 0:
                del self._open[number]
        return drawn


def export(model: Path, weights: str) -> Path:
    """Export the model to the library's format unless that was done before; return the path."""
    folder = model.with_name(f"{model.name}-openvino" + ("" if weights == "fp16" else f"-{weights}"))
    if not (folder / "openvino_detokenizer.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def load(model: str) -> OpenVinoEngine:
    return OpenVinoEngine(model)
