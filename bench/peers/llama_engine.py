"""llama.cpp, through llama-cpp-python, behind the thin server: every step is one batch of all open sequences.

The model is converted once to GGUF next to the checkpoint, in bfloat16, or by llama.cpp itself to Q8_0 or Q4_0 if
PEER_FORMAT is int8 or int4. Keys and values are bfloat16 if the build
supports it, otherwise float16. A finished sequence keeps its cells, and a prompt that shares a prefix with one
continues from there, as in llama.cpp's own server.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

NUM_SEQS = 64
NUM_CELLS = 32_768
"""Tokens of which the cache holds keys and values, of all sequences together."""
BATCH = 2048
KV_TYPES = {"bf16": 30, "f16": 1}
"""Of ggml's `ggml_type`; the bindings have no name for the first."""
FILE_TYPES = {"int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
"""Of llama.cpp's `llama_ftype`."""

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Sequence:
    """One of the cache's sequences: its tokens and the request that it serves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        """The tokens whose keys and values it holds."""
        self.todo: list[int] = []
        self.request: int | None = None
        self.num_left = 0


class LlamaEngine:
    gather_s = 0.0

    def __init__(self, model: str) -> None:
        kv = os.environ.get("LLAMA_KV", "bf16")
        num_threads = len(os.sched_getaffinity(0))
        llama_cpp.llama_backend_init()
        path = in_format(convert(Path(model)), os.environ.get("PEER_FORMAT", "bf16"))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = NUM_CELLS
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = NUM_SEQS
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        params.type_k = params.type_v = KV_TYPES[kv]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._num_vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._sequences = [Sequence(number) for number in range(NUM_SEQS)]
        self._waiting: list[tuple[int, list[int], int]] = []
        version = llama_cpp.__version__
        self.info: dict[str, Any] = {
            "version": version,
            "weights": path.suffixes[0].removeprefix(".") if len(path.suffixes) > 1 else "bfloat16",
            "weights_bytes": llama_cpp.llama_model_size(self._model),
            "kv": kv,
            "prefix_cache": True,
        }

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((number, prompt, max_tokens))

    def step(self) -> list[tuple[int, int, bool]]:
        self._admit()
        sampled: list[tuple[Sequence, int]] = []
        size = 0
        for sequence in self._sequences:
            if sequence.request is None or size == BATCH:
                continue
            fed = sequence.todo[: BATCH - size]
            for offset, token_id in enumerate(fed):
                self._put(size + offset, token_id, len(sequence.tokens) + offset, sequence.number)
            size += len(fed)
            sequence.tokens += fed
            del sequence.todo[: len(fed)]
            if not sequence.todo:
                self._batch.logits[size - 1] = True
                sampled.append((sequence, size - 1))
        self._batch.n_tokens = size
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._draw(sequence, at) for sequence, at in sampled]

    def _admit(self) -> None:
        idle = [sequence for sequence in self._sequences if sequence.request is None]
        while self._waiting and idle:
            request, prompt, max_tokens = self._waiting.pop(0)
            # the last token is always computed, for its logits
            shared = {sequence.number: common(sequence.tokens, prompt[:-1]) for sequence in idle}
            sequence = max(idle, key=lambda one: (shared[one.number], -len(one.tokens)))
            idle.remove(sequence)
            kept = shared[sequence.number]
            llama_cpp.llama_memory_seq_rm(self._memory, sequence.number, kept, -1)
            sequence.tokens, sequence.todo = prompt[:kept], prompt[kept:]
            sequence.request, sequence.num_left = request, max_tokens
            self._forget(idle)

    def _forget(self, idle: list[Sequence]) -> None:
        """Free the cells of idle sequences, the longest first, if there are too few."""
        capacity = NUM_CELLS
        while sum(len(one.tokens) + len(one.todo) + one.num_left for one in self._sequences) > capacity and idle:
            longest = max(idle, key=lambda one: len(one.tokens))
            if not longest.tokens:
                return
            llama_cpp.llama_memory_seq_rm(self._memory, longest.number, 0, -1)
            longest.tokens = []

    def _put(self, at: int, token_id: int, position: int, sequence: int) -> None:
        batch = self._batch
        batch.token[at], batch.pos[at] = token_id, position
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.logits[at] = False

    def _draw(self, sequence: Sequence, at: int) -> tuple[int, int, bool]:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        token_id = int(np.ctypeslib.as_array(logits, shape=(self._num_vocabulary,)).argmax())
        request = sequence.request
        if request is None:
            raise RuntimeError("a sequence without a request was computed")
        sequence.todo = [token_id]
        sequence.num_left -= 1
        if sequence.num_left == 0:
            sequence.request, sequence.todo = None, []
        return request, token_id, sequence.num_left == 0


def common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def convert(model: Path) -> Path:
    """Convert the checkpoint to GGUF unless that was done before; return the path."""
    path = model.with_name(model.name + ".gguf")
    if path.exists():
        return path
    config = json.loads((model / "config.json").read_text())
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if name in special else gguf.TokenType.NORMAL for name in vocabulary]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, shape, data in tensors(model / "model.safetensors"):
        if len(shape) == 1:  # norms are float32 there
            wide = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(target(name), wide)
        else:
            writer.add_tensor(target(name), data.reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def in_format(path: Path, format_: str) -> Path:
    """Quantize the converted model unless that was done before; return the path."""
    if format_ not in FILE_TYPES:
        return path
    name, file_type = FILE_TYPES[format_]
    quantized = path.with_name(f"{path.stem.replace('.', '-')}.{name}.gguf")
    if not quantized.exists():
        partial = quantized.with_suffix(".partial")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = file_type
        if llama_cpp.llama_model_quantize(str(path).encode(), str(partial).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp could not make {name} of {path}")
        partial.rename(quantized)
    return quantized


def tensors(path: Path) -> Any:
    """Yield names, shapes and bytes of a safetensors file; numpy cannot load it because it has no bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry["shape"], np.asarray(data[8 + length + begin : 8 + length + end])


def target(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    name = name.removesuffix(".weight").removeprefix("model.")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[name]


def load(model: str) -> LlamaEngine:
    return LlamaEngine(model)
