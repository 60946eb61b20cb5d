"""Compare what a model predicts in one configuration with what it predicts in another, teacher-forced.

    python -m bench.accuracy --kv-cache-dtype int8 [--json] [--quick] [--model demo] [--tokens 20000]
    python -m bench.accuracy --quantization int4 --activations int8

Both get the same texts, and at each token the distribution of the next one is compared: `mean_kl` is the mean of
KL(base || measured) in nats, `argmax_agreement` the share of tokens whose likeliest successor is the same. The flags of
a setting say what is measured, `--base-...` what it is compared with: by default the same, but with a KV cache in
float32, and with `--quantization` the same weights dequantized, computed in float32 by the reference. The demo model
reads chats that it was never trained on, any other the docstrings of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import tokenizers
import torch

from quipu.actors.shared.checkpoint import DEMO, resolve
from quipu.kernels.backend import BackendConfig
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.demo.chat_encoder import ChatEncoder, docstrings
from quipu.kernels.demo.text.chat_mixture import HELD_OUT, draw_document_chat, draw_short_chat
from quipu.kernels.load import load_backend
from quipu.kernels.reference.reference_backend import ReferenceBackend

SETTINGS = {
    "executor": "auto",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "quantization": "none",
    "activations": "auto",
}
"""What can be compared, and the default of what is measured."""
BASE = {"kv_cache_dtype": "float32"}
"""What it is compared with, where that is not the same."""
BASE_OF_QUANTIZED = {**BASE, "executor": "reference", "dtype": "float32", "activations": "auto"}
"""The same with quantized weights."""
BLOCK_SIZE = 16
ROW_TOKENS = 2048
"""Longest text."""
CHUNK = 256
"""Tokens in a pass, whose logits are held in both configurations."""
NUM_FACTS = 40
"""Of the documents in every second chat, which take up to 1,600 tokens."""
QUICK_TOKENS = 1000

LogitsBackend = CpuBackend | ReferenceBackend


@attrs.frozen
class Report:
    """How far apart two configurations are."""

    num_tokens: int
    mean_kl: float
    max_kl: float
    argmax_agreement: float


def compare(model: Path, measured: dict[str, str], base: dict[str, str], num_tokens: int) -> Report:
    """Run the model in both configurations, which are settings as in SETTINGS, over so many tokens."""
    ours, theirs = make_backend(model, measured), make_backend(model, base)
    kls, agreed = [], []
    left = num_tokens
    for text in texts_for(model):
        row = text[: min(ROW_TOKENS, left)]
        for start in range(0, len(row), CHUNK):
            chunk = row[start : start + CHUNK]
            our_NV, their_NV = (logits_of(backend, chunk, start) for backend in (ours, theirs))
            kls.append(kl_of(their_NV, our_NV))
            agreed.append(our_NV.argmax(-1) == their_NV.argmax(-1))
        left -= len(row)
        if left == 0:
            break
    kl_N, agreed_N = torch.cat(kls), torch.cat(agreed)
    return Report(len(kl_N), kl_N.mean().item(), kl_N.max().item(), agreed_N.double().mean().item())


def base_of(measured: dict[str, str]) -> dict[str, str]:
    """Return what a configuration is compared with unless something else is asked for."""
    return {**measured, **(BASE if measured["quantization"] == "none" else BASE_OF_QUANTIZED)}


def make_backend(model: Path, settings: dict[str, str]) -> LogitsBackend:
    """Load the model with room for one text."""
    chosen: dict[str, Any] = {**SETTINGS, **settings}
    executor = chosen.pop("executor")
    chosen["quantization"] = None if chosen["quantization"] == "none" else chosen["quantization"]
    backend = load_backend(
        executor,
        BackendConfig(
            model_path=model,
            load_format="auto",
            block_size=BLOCK_SIZE,
            num_blocks=1 + ROW_TOKENS // BLOCK_SIZE,
            max_num_seqs=1,
            max_model_len=ROW_TOKENS,
            max_num_batched_tokens=CHUNK,
            **chosen,
        ),
    )
    if not isinstance(backend, LogitsBackend):
        raise ValueError(f"the {executor} executor does not return logits: choose cpu or reference")
    return backend


def texts_for(model: Path) -> Iterator[list[int]]:
    """Return token ids of texts, without end."""
    if model == DEMO:
        random, encoder = Random(HELD_OUT), ChatEncoder()
        while True:
            for chat in (draw_document_chat(random, NUM_FACTS), draw_short_chat(random)):
                yield encoder.encode(chat)[0].tolist()
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("\n\n".join(docstrings()), add_special_tokens=False).ids
    while True:
        yield from (ids[start : start + ROW_TOKENS] for start in range(0, len(ids), ROW_TOKENS))


def logits_of(backend: LogitsBackend, token_ids: Sequence[int], position: int) -> torch.Tensor:
    """Feed a chunk of a text; return the logits of each token's successor."""
    batch = StepBatch(
        slots=[0],
        query_start=[0, len(token_ids)],
        positions=[position],
        token_ids=list(token_ids),
        block_tables=[list(range(1, 1 + ROW_TOKENS // BLOCK_SIZE))],
        samples=[True],
    )
    return backend.logits(batch, list(range(len(token_ids)))).double()


def kl_of(base_NV: torch.Tensor, measured_NV: torch.Tensor) -> torch.Tensor:
    """Return KL(base || measured) of each row."""
    base_NV, measured_NV = base_NV.log_softmax(-1), measured_NV.log_softmax(-1)
    return (base_NV.exp() * (base_NV - measured_NV)).sum(-1)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help=f"smoke test: {QUICK_TOKENS} tokens")
    parser.add_argument("--model", default="demo", help="a folder, or the demo model (demo)")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to compare (20000)")
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{_flag(name)}", default=default, help=f"what is measured ({default})")
        parser.add_argument(f"--base-{_flag(name)}", help="what it is compared with")
    arguments = parser.parse_args()
    given: dict[str, Any] = vars(arguments)
    measured = {name: given[name] for name in SETTINGS}
    usual = base_of(measured)
    base = {name: given[f"base_{name}"] or usual[name] for name in SETTINGS}
    num_tokens = QUICK_TOKENS if arguments.quick else arguments.tokens
    report = compare(resolve(arguments.model), measured, base, num_tokens)
    if arguments.json:
        print(json.dumps({"measured": measured, "base": base, **attrs.asdict(report)}))
        return
    for title, settings in (("measured", measured), ("base", base)):
        print(f"{title:10}", ", ".join(f"{name} {value}" for name, value in settings.items()))
    print(f"over {report.num_tokens} tokens: mean KL {report.mean_kl:.2e} (largest {report.max_kl:.2e}),")
    print(f"argmax agreement {report.argmax_agreement:.2%}")


if __name__ == "__main__":
    main()
