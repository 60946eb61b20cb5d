"""Measure every supported model family, and write the table of `docs/operate/models.md`.

    python -m bench.model_table [--json] [--quick] [--write] [--families LlamaForCausalLM ...]

*Parity* is that of the tests' small random checkpoints (`tests/kernels/oracles.py`), the worst of a family: the logits
of the cpu executor, over a prefill and paged decodes, beside transformers' in float32, in standard deviations of the
logits. *Speed* is that of dummy weights in bfloat16 in one shape for all families (`SHAPE`), the best of several steps:
a prompt of 512 tokens, and decodes with 256 tokens of context. A mixture has eight experts of half the width, of which
a token has two, so that a token multiplies with about as many weights in each family.

With `--write` the rows of these families replace those of the table in the page, between two markers, whose others keep
their numbers; `tests/bench/test_model_table.py` finds a table that no longer has the families, formats and executors of
the code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

# as in `bench/execution.py`: read once, when torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import attrs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.timing import best_s
from quipu.kernels.backend import BackendConfig
from quipu.kernels.checkpoints.formats import methods_of
from quipu.kernels.checkpoints.gguf_specifics import architectures_of
from quipu.kernels.cpu.build import choose_instruction_set, processor_flags
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.load import OWN_EXECUTORS, load_backend
from quipu.kernels.models.families import FAMILIES
from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import backend_config, make_checkpoint
from tests.kernels.oracles import run, run_transformers
from tests.kernels.step_batches import make_batch, prompt

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "operate" / "models.md"
BEGIN = "<!-- made by `python -m bench.model_table --write` -->"
END = "<!-- end of the table -->"
HEADER = (
    "| architecture | formats | executors | float32 | bfloat16 | transformers in bfloat16 "
    "| prefill, decode of 1 and 8 | by transformers |\n|---|---|---|---|---|---|---|---|"
)
NUM_DESCRIBED = 3
"""Columns that the code determines."""
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 512}
"""Overrides of `SHAPE` for `--quick`."""
_EXPERTS = {"num_experts_per_tok": 2, "n_shared_experts": 0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
_LATENT = {"kv_lora_rank": 256, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_BY_DEFAULT = (
    *("layer_types", "rope_parameters", "rope_scaling", "no_rope_layers", "mlp_only_layers", "sliding_window"),
    *("mamba_d_head", "head_dim", "qk_head_dim", "per_layer_config", "moe_layers"),
    *("attention_chunk_size", "floor_scale", "attn_scale", "activation_sparsity_pattern"),
)
"""Entries that depend on the shape: the family's own defaults take their place."""
PREFILL, CONTEXT, STREAMS, BLOCK_SIZE = 512, 256, 8, 16
QUICK_FAMILIES = ("GptOssForCausalLM",)


@attrs.frozen
class Parity:
    """Differences from transformers' logits in float32, in their standard deviations."""

    mean: float
    largest: float


@attrs.frozen
class Speed:
    """Tokens per second."""

    prefill: float
    decode: float
    decode_8: float


@attrs.frozen
class Row:
    """What is measured of a family."""

    float32: Parity
    bfloat16: Parity
    theirs: Parity
    """Of transformers in bfloat16."""
    speed: Speed
    their_speed: Speed | None
    """Of the transformers executor; None: it refuses the model."""


def checkpoints_of(architecture: str) -> list[str]:
    """Return the names of the tests' checkpoints of a family."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name, config in CONFIGS.items() if named[config().model_type] == architecture]


def measure_parity(name: str, folder: Path) -> dict[str, Parity]:
    """Make one of the tests' checkpoints; return its deviations by the name of a field of `Row`."""
    path = make_checkpoint(folder, name)
    exact = run_transformers(path, "float32")

    def beside(logits: Any) -> Parity:
        difference = (logits - exact).abs() / exact.std()
        return Parity(difference.mean().item(), difference.max().item())

    ours = {dtype: run(CpuBackend(backend_config(path, dtype=dtype))) for dtype in ("float32", "bfloat16")}
    return {
        **{dtype: beside(logits) for dtype, logits in ours.items()},
        "theirs": beside(run_transformers(path, "bfloat16")),
    }


def worst(found: list[dict[str, Parity]]) -> dict[str, Parity]:
    return {
        field: Parity(max(one[field].mean for one in found), max(one[field].largest for one in found))
        for field in found[0]
    }


def in_shape(architecture: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` of a family in this shape; what else it has is that of the tests' first checkpoint."""
    config = CONFIGS[checkpoints_of(architecture)[0]]().to_dict()
    changed = dict(shape)
    if "kv_lora_rank" in config:
        changed |= {**_LATENT, "num_key_value_heads": shape["num_attention_heads"]}
    if set(config.get("layer_types") or ()) == {"full_attention"}:
        changed["layer_types"] = ["full_attention"] * shape["num_hidden_layers"]
    if config.get("shared_intermediate_size"):
        changed["shared_intermediate_size"] = shape["intermediate_size"]
    for count in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(count):
            width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
            changed |= {count: 8, width: shape["intermediate_size"] // 2}
            changed |= {name: value for name, value in _EXPERTS.items() if name in config}
    if config.get("intermediate_size_mlp"):
        changed["intermediate_size_mlp"] = shape["intermediate_size"]
    if config.get("num_kv_shared_layers") is not None:
        changed |= {
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": shape["vocab_size"],
        }
    if config.get("per_layer_config") is not None:
        changed["global_head_dim"] = 128
    if "altup_num_inputs" in config:
        half = shape["num_hidden_layers"] // 2
        changed |= {"altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256}
        changed["activation_sparsity_pattern"] = [0.95] * half + [0.0] * (shape["num_hidden_layers"] - half)
    if "head_dim" not in config or "kv_lora_rank" in config:
        del changed["head_dim"]
    kept = {name: value for name, value in config.items() if name not in _BY_DEFAULT}
    return {**kept, **changed, "architectures": [architecture], "dtype": "bfloat16"}


def measure_speed(executor: str, folder: Path) -> Speed:
    """Time steps of the model in this folder. Raises ValueError if the executor refuses it."""
    longest, per_row = PREFILL, CONTEXT // BLOCK_SIZE
    backend = load_backend(
        executor,
        BackendConfig(
            model_path=folder,
            dtype="auto",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=1 + STREAMS * per_row + longest // BLOCK_SIZE,
            max_num_seqs=STREAMS,
            max_model_len=longest,
            max_num_batched_tokens=longest,
        ),
    )
    assert isinstance(backend, CpuBackend | TransformersBackend)
    backend.cache.fill(0.0)  # decodes read a context that nothing has written
    prefill = {"token_ids": prompt(PREFILL, seed=1), "position": 0, "blocks": list(range(1, 1 + PREFILL // BLOCK_SIZE))}
    decodes = [
        {
            "token_ids": prompt(1, seed=row),
            "position": CONTEXT - 1,
            "blocks": list(range(1 + row * per_row, 1 + (row + 1) * per_row)),
            "slot": row,
        }
        for row in range(STREAMS)
    ]
    rates = []
    for rows, count, repeats in (([prefill], PREFILL, 4), (decodes[:1], 1, 20), (decodes, STREAMS, 10)):
        step = partial(backend.step, make_batch(*rows))
        step()  # memory is touched for the first time
        rates.append(count / best_s(step, repeats))
    backend.close()
    return Speed(*rates)


def measure(architecture: str, shape: Mapping[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        found = [measure_parity(name, Path(folder, name)) for name in checkpoints_of(architecture)]
        (Path(folder) / "config.json").write_text(json.dumps(in_shape(architecture, shape)))
        try:
            theirs = measure_speed("transformers", Path(folder))
        except ValueError:
            theirs = None
        return Row(**worst(found), speed=measure_speed("cpu", Path(folder)), their_speed=theirs)


def described(architecture: str) -> list[str]:
    """Return the cells that the code determines: the name, formats and executors."""
    gguf = [f"GGUF `{name}`" for name in architectures_of(architecture)]
    formats = ["safetensors", *methods_of(architecture), *gguf]
    return [f"`{architecture}`", ", ".join(formats), ", ".join(OWN_EXECUTORS)]


def cells_of(row: Row) -> list[str]:
    """Return the cells of what is measured."""
    parities = [f"{one.mean:.1e}, {one.largest:.1e}" for one in (row.float32, row.bfloat16, row.theirs)]
    speeds = [
        "refused" if one is None else f"{one.prefill:,.0f}, {one.decode:,.0f}, {one.decode_8:,.0f}"
        for one in (row.speed, row.their_speed)
    ]
    return [*parities, *speeds]


def line_of(architecture: str, cells: list[str]) -> str:
    """Return a family's line of the table."""
    return "| " + " | ".join([*described(architecture), *cells]) + " |"


def machine() -> str:
    """Return the class of this machine: its processor and what of it is used."""
    text = Path("/proc/cpuinfo").read_text()
    models = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    model = next(models, "unknown processor")
    threads = os.environ["OMP_NUM_THREADS"]
    return f"{model}, {threads} threads, `{choose_instruction_set(processor_flags()).name}`"


def read_rows(table: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table, by the family's name."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows}


def write(rows: Mapping[str, Row], document: Path) -> None:
    """Replace the table in the document; families that were not measured keep their numbers."""
    before, _, rest = document.read_text("utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    cells = {name: row[NUM_DESCRIBED:] for name, row in read_rows(table).items() if name in FAMILIES}
    cells |= {name: cells_of(row) for name, row in rows.items()}
    measured = f"Measured on {datetime.datetime.now(datetime.UTC).date()} or before on: {machine()}."
    lines = [HEADER, *(line_of(name, cells[name]) for name in sorted(cells))]
    document.write_text("\n".join([before + BEGIN, measured, "", *lines, "", END]) + after, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model_table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: one family, a tiny model")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/operate/models.md")
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--write is not for numbers of --quick")
    families = QUICK_FAMILIES if arguments.quick else arguments.families
    rows = {one: measure(one, {**SHAPE, **TINY} if arguments.quick else SHAPE) for one in families}
    if arguments.write:
        write(rows, DOCUMENT)
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": {name: attrs.asdict(row) for name, row in rows.items()}}))
        return
    print("\n".join([machine(), HEADER, *(line_of(name, cells_of(row)) for name, row in rows.items())]))


if __name__ == "__main__":
    main()
