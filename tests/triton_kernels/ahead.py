"""Compile every kernel for sm_90 without a GPU, in the shapes of real models, and print properties of the code as JSON.

    python tests/triton_kernels/ahead.py

It runs in a process of its own, because Triton compiles nothing in interpreter mode. `test_triton_ahead.py` checks the
results.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quipu.kernels.triton import (
    activation,
    decode,
    experts,
    linear,
    low_rank_kernels,
    mixed_copies,
    prefill,
    rope_kv,
    sample,
)
from quipu.kernels.triton.attention import decode_launch, prefill_launch
from quipu.kernels.triton.configs import HOPPER, Launch, tiles_of_heads

TARGET = GPUTarget("cuda", 90, 32)
BF16, F32, I32, I64, F64 = "*bf16", "*fp32", "*i32", "*i64", "*fp64"
NUMBERS = dict.fromkeys(
    ("eps", "scale", "soft_cap", "cap", "alpha", "limit", "factor", "mixer_range", "deviations", "floor"), "fp32"
)
SCALARS = {"num_drawn", "num_rows"}
"""Integers that are not multiples of 16 in general; every other integer is a stride."""
COLUMNS = {
    "positions_ptr", "write_slots_ptr", "row_slots_ptr", "row_tokens_ptr", "row_ends_ptr", "items_ptr",
    "item_start_ptr", "num_items_ptr", "tiles_ptr", "tables_ptr",
}  # fmt: skip


@attrs.frozen
class Case:
    name: str
    kernel: Any
    pointers: dict[str, str]
    """Types of pointers other than bf16 tensors and the columns."""
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


def attention_cases(
    name: str, heads: int, kv_heads: int, head_dim: int, *, stored: str = BF16, **meaning: Any
) -> list[Case]:
    group, tiles = heads // kv_heads, tiles_of_heads(HOPPER, head_dim)
    constants = {
        "SINKS": False, "CAPPED": False, "WINDOW": 0, "IN_CHUNKS": False, "SLOTS": 16, "KV_HEADS": kv_heads,
        "GROUP": group, "E": head_dim, "E_BLOCK": triton.next_power_of_2(head_dim),
        "KEYS": tiles.keys, "CHUNK": tiles.chunk, **meaning,
    }  # fmt: skip
    held = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), stored)
    parts = {"weighted_ptr": F32, "highest_ptr": F32, "total_ptr": F32, **held}
    few, many = decode_launch(tiles, group), prefill_launch(tiles, group, head_dim)
    sums = {key: constants[key] for key in ("SINKS", "KV_HEADS", "GROUP", "E", "E_BLOCK")}

    def case(what: str, kernel: Any, pointers: dict[str, str], launch: Launch, **more: Any) -> Case:
        known = {key: value for key, value in constants.items() if key in kernel.arg_names}
        return Case(
            f"{what} {name}", kernel, pointers, {**known, "ROWS": launch.rows, **more}, launch.num_warps,
            launch.num_stages,
        )  # fmt: skip

    # in float32, and for latents, both use one tile (`triton_backend.py`)
    own = (
        [case("prefill", prefill.prefill_kernel, held, many, TOKENS=many.rows // group)]
        if stored == BF16 and many != few
        else []
    )
    return [
        *own,
        case("decode", decode.decode_chunks_kernel, parts, few, PROGRAMS=HOPPER.programs // kv_heads),
        case("shared prefill", prefill.prefill_kernel, held, few, TOKENS=few.rows // group),
        Case(f"decode sum {name}", decode.decode_sum_kernel, parts, {**sums, "ROWS": few.rows}, few.num_warps),
    ]


def rope_case(name: str, heads: int, kv_heads: int, head_dim: int, half: int, **meaning: Any) -> Case:
    rest = head_dim - 2 * half
    constants = {
        "FIRST_PART": 0, "NORM": True, "ROPE": True, "SLOTS": 16, "HEADS": heads,
        "HEADS_BLOCK": triton.next_power_of_2(heads), "KV_HEADS": kv_heads,
        "KV_HEADS_BLOCK": triton.next_power_of_2(kv_heads), "E": head_dim, "R": half,
        "R_BLOCK": triton.next_power_of_2(half), "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0, **meaning,
    }  # fmt: skip
    return Case(f"rope {name}", rope_kv.rope_and_write_kernel, {"cos_ptr": F32, "sin_ptr": F32}, constants)


def linear_cases(num_in: int, num_out: int) -> list[Case]:
    tile = {
        "NUM_IN": num_in, "NUM_OUT": num_out, "ROWS": HOPPER.linear.rows, "COLUMNS": HOPPER.columns,
        "DEPTH": HOPPER.depth, "SLICE": HOPPER.slice,
    }  # fmt: skip
    launch = (HOPPER.linear.num_warps, HOPPER.linear.num_stages)
    name = f"{num_in} to {num_out}"
    slices = triton.cdiv(num_in, HOPPER.slice)
    return [
        Case(f"slices {name}", linear.slices_kernel, {"parts_ptr": F32}, tile, *launch),
        Case(f"linear {name}", linear.linear_kernel, {}, {**tile, "BIASED": True}, *launch),
        Case(
            f"add slices {name}", linear.add_slices_kernel, {"parts_ptr": F32},
            {"NUM_OUT": num_out, "SLICES": slices, "BIASED": True, "BLOCK": 1024},
        ),
    ]  # fmt: skip


def expert_cases() -> list[Case]:
    """Return cases in the shape of Qwen3-30B-A3B: 128 experts, of which 8 are chosen."""
    tile = {"ROWS": HOPPER.linear.rows, "COLUMNS": HOPPER.columns, "DEPTH": HOPPER.depth, "SLICE": HOPPER.slice}
    pairs = {"matrices_ptr": I64, "order_ptr": I32, "pair_ends_ptr": I32, "tile_ends_ptr": I32}
    shape = {"EXPERTS": 128, "EXPERTS_BLOCK": 128, "PAIRS_A_ROW": 8, "BIASED": True, "NUM_IN": 2048, "NUM_OUT": 1536}
    chosen = {"EXPERTS": 128, "CHOSEN": 8, "CHOSEN_BLOCK": 8, "NORMALISE": True, "BLOCK": 128}
    chosen |= {"SIGMOID": False, "BIASED": False, "GROUPS": 1, "CHOSEN_GROUPS": 1, "MIXER": False, "SCALED": False}
    chosen |= {"BY_SCORE": False}
    of_groups = {"EXPERTS": 256, "BLOCK": 256, "SIGMOID": True, "BIASED": True, "GROUPS": 8, "CHOSEN_GROUPS": 4}
    mixed = {"EXPERTS": 16, "BLOCK": 16, "CHOSEN": 2, "CHOSEN_BLOCK": 2, "NORMALISE": False, "MIXER": True}
    scaled = {"SCALED": True}
    routed = {"chosen_ptr": I32, "weights_ptr": F32, "bias_ptr": F32, "scale_ptr": F32}
    launch = (HOPPER.linear.num_warps, HOPPER.linear.num_stages)
    return [
        Case("route", experts.route_kernel, routed, chosen),
        Case("route of groups", experts.route_kernel, routed, chosen | of_groups),
        Case("route of SparseMixer", experts.route_kernel, routed, chosen | mixed),
        Case("route with factors of experts", experts.route_kernel, routed, chosen | scaled),
        Case("route by score", experts.route_kernel, routed, chosen | {"SIGMOID": True, "BY_SCORE": True}),
        Case("pairs of 128 experts", experts.pairs_linear_kernel, pairs, {**shape, **tile}, *launch),
        Case("weigh", experts.weigh_kernel, {"weights_ptr": F32}, {"CHOSEN": 8, "WIDTH": 2048, "BLOCK": 1024}),
    ]


def adapter_cases(name: str, num_in: int, num_out: int, parts: int, stored: str = BF16) -> list[Case]:
    """Return cases of rank 16."""
    of_rows = {"rows_ptr": I32, "tiles_ptr": I32, "parts_ptr": I32, "narrow_ptr": F32}
    of_rows |= dict.fromkeys(("x_ptr", "a_ptr", "b_ptr", "y_ptr"), stored)
    tile = {"ROWS": HOPPER.adapted.rows}
    launch = (HOPPER.adapted.num_warps, HOPPER.adapted.num_stages)
    rank, slices = parts * 16, triton.cdiv(num_in, HOPPER.slice)
    shrunk = {"RANK": rank, "RANKS": min(64, triton.next_power_of_2(rank)), "DEPTH": HOPPER.depth}
    expanded = {"PARTS": parts, "RANK": 16, "SLICES": slices, "RANKS": 16, "COLUMNS": HOPPER.columns}
    return [
        Case(
            f"shrink {name}", low_rank_kernels.shrink_kernel, of_rows,
            {**tile, **shrunk, "NUM_IN": num_in, "SLICE": HOPPER.slice}, *launch,
        ),
        Case(
            f"expand {name}", low_rank_kernels.expand_kernel, of_rows,
            {**tile, **expanded, "NUM_OUT": num_out}, *launch,
        ),
    ]  # fmt: skip


def cases() -> list[Case]:
    width = {"WIDTH": 1024, "BLOCK": 1024}
    draws = {
        "logits_ptr": F32,
        "rows_ptr": I64,
        "numbers_ptr": F64,
        "counts_ptr": I64,
        "ids_ptr": I32,
        "failed_ptr": I32,
    }
    kept = {"ids_ptr": I32, "slots_ptr": I64, "last_drawn_ptr": I32}
    return [
        *attention_cases("16/8 heads of 128", 16, 8, 128),
        *attention_cases("32/8 heads of 128", 32, 8, 128),
        *attention_cases("24/8 heads of 96, chunks", 24, 8, 96, WINDOW=8192, IN_CHUNKS=True),
        *attention_cases("16/8 heads of 128 in float32", 16, 8, 128, stored=F32),
        *attention_cases("8/4 heads of 256, window, soft cap", 8, 4, 256, CAPPED=True, WINDOW=4096),
        *attention_cases("64/8 heads of 64, window, sinks", 64, 8, 64, SINKS=True, WINDOW=128),
        *attention_cases("16/1 heads of 576", 16, 1, 576),
        rope_case("16/8 heads of 128", 16, 8, 128, 64),
        rope_case("32/8 heads of 128, no norm", 32, 8, 128, 64, NORM=False),
        rope_case("24/8 heads of 128, 96 rotated", 24, 8, 128, 48, NORM=False),
        *linear_cases(1024, 6144),
        *expert_cases(),
        *adapter_cases("1024 to 4096 of three parts", 1024, 4096, 3),
        *adapter_cases("3072 to 1024", 3072, 1024, 1),
        *adapter_cases("1024 to 4096 of three parts in float32", 1024, 4096, 3, F32),
        Case("norm", activation.rms_norm_kernel, {}, {**width, "ADD": False}),
        Case("add and norm", activation.rms_norm_kernel, {}, {"WIDTH": 4096, "BLOCK": 4096, "ADD": True}, 8),
        Case("layer norm", activation.layer_norm_kernel, {}, {**width, "BIASED": True}),
        Case("plain gelu", activation.gelu_kernel, {}, width),
        Case("product", activation.mul_kernel, {}, {**width, "ONE": False}),
        Case("factor", activation.mul_kernel, {}, {**width, "ONE": True}),
        Case("silu", activation.gated_kernel, {}, {"WIDTH": 3072, "BLOCK": 1024, "GELU": False}),
        Case("gelu", activation.gated_kernel, {}, {"WIDTH": 3072, "BLOCK": 1024, "GELU": True}),
        Case("sparse gelu", activation.sparse_gelu_mul_kernel, {}, {"WIDTH": 16384, "BLOCK": 16384}, 16),
        Case("matched copies", mixed_copies.match_copies_kernel, {}, {"COPIES": 3, "WIDTH": 2048, "BLOCK": 2048}),
        Case(
            "mixed copies",
            mixed_copies.mix_copies_kernel,
            {},
            {"COPIES": 4, "MIXED": 4, "WIDTH": 2048, "BLOCK": 1024},
        ),
        Case("clamped swiglu", activation.clamped_swiglu_kernel, {}, {"WIDTH": 2880, "BLOCK": 1024}),
        Case("add", activation.add_kernel, {}, width),
        Case("soft cap", activation.soft_cap_kernel, {"x_ptr": F32, "out_ptr": F32}, width),
        Case("embed", activation.embed_kernel, {"ids_ptr": I32}, width),
        Case("draw", sample.draw_kernel, draws, {"V": 151_936, "BLOCK": 4096}, 16),
        Case("keep drawn", sample.keep_drawn_kernel, kept, {"BLOCK": 64}),
    ]


def compile_case(case: Case) -> dict[str, Any]:
    names = case.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in case.constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = case.pointers.get(name, I32 if name in COLUMNS else BF16)
        else:
            signature[name] = NUMBERS.get(name, "i32")
        aligned = name.endswith(("_ptr", "_stride"))
        if signature[name] != "constexpr" and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": HOPPER.fusion}
    compiled = triton.compile(source, target=TARGET, options=options)
    return {"name": case.name, "shared_bytes": compiled.metadata.shared, **_assembled(compiled.asm["cubin"])}


def _assembled(cubin: bytes) -> dict[str, Any]:
    """Return what the machine code uses: registers, local memory (for spilled registers), instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_disassembled(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    assert registers is not None and stack is not None, usage
    return {
        "registers": int(registers[1]),
        "stack_bytes": int(stack[1]),
        "spills": code.count(" STL"),
        "wgmma": code.count(" HGMMA."),
        "mma": code.count(" HMMA."),
        "async_copies": code.count(" LDGSTS."),
        "contracted": code.count(" FFMA"),
    }


def _disassembled(option: str, cubin: str) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {"PATH": str(tools)}
    command = [tools / "cuobjdump", option, cubin]
    output: str = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return output


if __name__ == "__main__":
    wanted = sys.argv[1:]
    print(json.dumps([compile_case(case) for case in cases() if not wanted or any(w in case.name for w in wanted)]))
