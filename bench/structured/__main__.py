"""Measure what outputs that match a JSON schema cost, and how many of them are valid.

    python -m bench.structured [--json] [--quick] [--executor cpu] [--rows 32] [--rounds 30] [--parts PART ...]
                               [--schemas FOLDER ...] [--draws 5] [--seed 0]

The vocabulary has 151,936 entries of text. Three parts, all of them unless `--parts` names some:

    steps       a step with constrained rows and the same step without any: `added` is the median of their differences,
                `share` its share of the plain step, and `waited` how long sampling waited for masks. The model has the
                shape of Qwen3-0.6B and dummy weights, and each row a context of 512 tokens.
    compiling   the time to compile some schemas
    validity    of the schemas in `--schemas` (by default those that `make schemas` has fetched): how many are accepted,
                and the share of valid ones among random outputs. `ended` outputs have to be valid, `cut` ones to be the
                beginning of a valid one. A folder holds schemas, or files like those of the JSON-Schema-Test-Suite.

xgrammar is measured beside the last two, if `make schemas` has installed it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers.checkpoint import make_tokenizer
from bench.shapes import QWEN3_06B, TINY
from bench.structured.compiling import measure_compiling
from bench.structured.outputs import Drawer
from bench.structured.schemas import BUILT_IN, PACKAGES, collections
from bench.structured.validity import MakeValidator, measure_validity
from quipu.actors.grammars.grammar_library import GrammarLibrary

END_ID = 2
PARTS = ("steps", "compiling", "validity")
Results = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        QWEN3_06B.update(TINY)
    made = time.perf_counter()
    tokenizer = make_tokenizer(QWEN3_06B["vocab_size"])
    encoded = json.dumps(tokenizer).encode()
    began = time.perf_counter()
    library = GrammarLibrary(encoded, (END_ID,))
    report: Results = {"tokenizer_load_s": time.perf_counter() - began, "tokenizer_make_s": began - made}
    peer = None if arguments.quick else make_peer(tokenizer)
    report["xgrammar"] = "not installed" if peer is None else peer.version
    if "steps" in arguments.parts:
        report["steps"] = run_steps(encoded, arguments)
    if "compiling" in arguments.parts:
        report["compiling"] = measure_compiling(library, peer, 1 if arguments.quick else 5)
    if "validity" in arguments.parts:
        drawer = Drawer(library, tokenizer, END_ID, arguments.seed)
        report["validity"] = run_validity(library, drawer, peer, arguments)
    if arguments.json:
        print(json.dumps(report))
    else:
        print_report(report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, two rounds, a few schemas")
    parser.add_argument("--executor", default="cpu", choices=("cpu", "reference", "triton"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--schemas", nargs="+", type=Path, default=[], metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=5, help="outputs for each schema")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds, arguments.draws = 8, 2, 2
    return arguments


def run_steps(tokenizer_json: bytes, arguments: argparse.Namespace) -> list[Results]:
    from bench.execution import make_backend  # torch, which the other parts do without
    from bench.step_works import Setting
    from bench.structured.steps import measure_steps

    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(Setting(arguments.executor), Path(folder))
        results = measure_steps(backend, tokenizer_json, arguments.rows, arguments.rounds)
        backend.close()
    return results


def run_validity(library: GrammarLibrary, drawer: Drawer, peer: Any, arguments: argparse.Namespace) -> list[Results]:
    make_validator = None if arguments.quick else find_validator()
    found = [BUILT_IN] if arguments.quick else [BUILT_IN, *collections(arguments.schemas)]
    results = []
    for collection in found:
        report = measure_validity(library, drawer, collection, make_validator, arguments.draws)
        results.append(report.summary())
        if peer is not None:
            from bench.structured.beside import measure_beside

            beside = measure_beside(library, peer, collection, report.samples)
            results[-1]["xgrammar"] = beside.summary()
    return results


def find_validator() -> MakeValidator | None:
    if not is_installed("jsonschema"):
        return None
    from bench.structured.validator import Validator

    return lambda schema: Validator(schema).is_valid


def make_peer(tokenizer: Results) -> Any:
    """Return xgrammar; None if it is not installed."""
    if not is_installed("xgrammar"):
        return None
    from bench.structured.peer import Peer

    return Peer(tokenizer, END_ID)


def is_installed(module: str) -> bool:
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    return importlib.util.find_spec(module) is not None


def print_report(report: Results) -> None:
    print(f"loading a tokenizer of {QWEN3_06B['vocab_size']} entries: {report['tokenizer_load_s']:.2f} s")
    print(f"xgrammar: {report['xgrammar']}")
    if steps := report.get("steps"):
        print(f"{'constrained':>12} {'of rows':>8} {'step ms':>9} {'added ms':>9} {'share':>7} {'waited ms':>10}")
    for row in steps or ():
        print(
            f"{row['constrained']:12} {row['rows']:8} {row['step_ms']:9.2f} {row['added_ms']:9.3f} "
            f"{row['share']:7.1%} {row['waited_ms']:10.3f}"
        )
    if compiling := report.get("compiling"):
        print(f"{'schema':26} {'bytes':>7} {'compile ms':>11} {'xgrammar ms':>12}")
    for row in compiling or ():
        print(f"{row['schema']:26} {row['bytes']:7} {row['compile_ms']:11.2f} {shown(row['xgrammar_ms'], '12.2f')}")
    for row in report.get("validity", ()):
        print_collection(row)


def print_collection(row: Results) -> None:
    refused = ", ".join(f"{reason} {count}" for reason, count in row["refused"].items())
    print(f"\n{row['collection']}: {row['accepted']} of {row['schemas']} schemas accepted; refused: {refused}")
    print(
        f"  outputs: {row['outputs']}, of which {row['ended']} ended, valid {shown(row['valid_share'], '.2%')}; "
        f"{row['cut']} cut, {row['unfinished']} of them not finished, the rest beginnings of valid ones "
        f"{shown(row['prefix_share'], '.2%')}; not checked: {row['unchecked']}"
    )
    if row["valid_instances"] or row["invalid_instances"]:
        print(
            f"  its values: {row['valid_allowed']} of {row['valid_instances']} valid ones allowed, "
            f"{row['invalid_allowed']} of {row['invalid_instances']} invalid ones"
        )
    print(f"  admission: {row['admission_ms_p50']:.2f} ms (median), {row['admission_ms_max']:.2f} ms (longest)")
    if beside := row.get("xgrammar"):
        print(
            f"  xgrammar: {beside['accepted']} of {beside['schemas']} schemas accepted; "
            f"{beside['valid_allowed']} of {beside['valid_instances']} valid values allowed, "
            f"{beside['invalid_allowed']} of {beside['invalid_instances']} invalid ones"
        )
        for name in ("compile_ms", "mask_us"):
            ours, theirs = (
                " / ".join(shown(beside[f"{prefix}{name}_{label}"], ".2f") for label in ("p50", "mean", "max"))
                for prefix in ("quipu_", "")
            )
            print(f"  {name}, median / mean / longest, of {beside['both']} schemas: quipu {ours}; xgrammar {theirs}")
    for wrong in row["wrong"]:
        print(f"  WRONG {wrong}")


def shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


if __name__ == "__main__":
    main()
