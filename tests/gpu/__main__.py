"""`make gpu`: checks that need a GPU. Prints tables, writes JSON, exits with 1 if something failed.

    python -m tests.gpu [--json gpu.json] [--only parity,bits,limits,throughput] [--rehearse]
    python -m tests.gpu --only vllm [--json gpu.json] [--rehearse]

Needs torch with CUDA, Triton, numpy, attrs and safetensors; parity needs transformers, throughput all of quipu's
dependencies. Parts are independent: if one fails, it reports why and the others run. `--rehearse` runs all the code on
the CPU with Triton's interpreter (TRITON_INTERPRET=1) and tiny sizes. `vllm` tests another executor, in an environment
of its own, and runs alone (`vllm_on_gpu.py`); its rehearsal needs vLLM's build for CPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.machine import Machine

Rows = list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="(default: %(default)s)")
    parser.add_argument("--only", help="comma-separated parts to run")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to check that the code works")
    arguments = parser.parse_args()
    if arguments.only == "vllm":
        from tests.gpu import vllm_on_gpu

        return vllm_on_gpu.main(arguments.json, rehearsal=arguments.rehearse)
    from tests.gpu.machine import this_machine  # needs Triton

    machine = this_machine(rehearsal=arguments.rehearse)
    report: dict[str, Any] = {"machine": machine.describe(), "failed": {}}
    print(report["machine"])
    parts = _parts(machine, report)
    for name in arguments.only.split(",") if arguments.only else parts:
        try:
            report[name] = parts[name]()
            _print(name, report[name])
        except Exception as error:
            report["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"\n{name}: failed", file=sys.stderr)
            traceback.print_exc()
        arguments.json.write_text(json.dumps(report, indent=1))  # results so far, in case a later part does not end
    return 1 if report["failed"] or _wrong(report) else 0


def _parts(machine: Machine, report: dict[str, Any]) -> dict[str, Callable[[], Rows]]:
    """Return the parts, each of which imports its own dependencies: others may work without them."""

    def bits() -> Rows:
        from tests.gpu import bits

        return bits.products(machine) + bits.attention(machine) + bits.passes(machine)

    def parity() -> Rows:
        from tests.gpu.parity import families

        return families(machine)

    def limits() -> Rows:
        from tests.gpu import limits

        rates = limits.measure_rates(machine)
        report["rates"] = {"bytes_per_second": rates.bytes, "operations_per_second": rates.operations}
        print(report["rates"])
        found = limits.kernels(machine, rates)
        for determinism in ("fast", "strict"):
            found += limits.steps(machine, rates, determinism)
        return found

    def throughput() -> Rows:
        from tests.gpu.throughput import throughput

        return throughput(machine)

    return {"bits": bits, "parity": parity, "limits": limits, "throughput": throughput}


def _wrong(report: dict[str, Any]) -> bool:
    """Return whether parity exceeds its tolerance or a strict pass has different bits; other answers may be no."""
    strict = [row for row in report.get("bits", []) if row["question"] == "strict passes"]
    return any(not row["ok"] for row in report.get("parity", [])) or any(not row["alike"] for row in strict)


def _print(name: str, rows: Rows) -> None:
    print(f"\n{name}")
    for row in rows:
        print("  " + "  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
