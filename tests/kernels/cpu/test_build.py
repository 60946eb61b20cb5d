"""Building and choosing the CPU kernels, their cache, and the fallback on machines that cannot run them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import attrs
import pytest

from quipu.kernels.cpu import build as building
from quipu.kernels.cpu import compiling
from quipu.kernels.cpu.build import load_kernels, main
from quipu.kernels.cpu.compiling import build, find_compiler
from quipu.kernels.cpu.instruction_sets import (
    FORCED,
    INSTRUCTION_SETS,
    CannotBuild,
    InstructionSet,
    choose_instruction_set,
    processor_flags,
    usable_instruction_sets,
)
from quipu.kernels.load import load_backend
from quipu.kernels.triton import availability
from tests.kernels.cpu.cpu_backends import needs_kernels
from tests.kernels.kernel_checkpoints import backend_config
from tests.tiny import TINY

AVX2 = frozenset({"sse2", "avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
BF16 = AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore a forced instruction set in the environment, and any GPU, which `auto` would choose."""
    monkeypatch.delenv(FORCED, raising=False)
    monkeypatch.setattr(availability, "why_unavailable", lambda: "no GPU in these tests")


def test_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    """Read flags as Linux writes them."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 fma avx2 f16c\nprocessor : 1\nflags\t\t: fpu\n")
    assert choose_instruction_set(processor_flags(cpuinfo)).name == "avx2"
    assert processor_flags(tmp_path / "missing") == frozenset()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (AVX2, ["avx2"]),
        (AVX512 - {"avx512dq"}, ["avx2"]),
        (AVX512, ["avx512", "avx2"]),
        (AVX512 | {"avx512_vnni"}, ["avx512_vnni", "avx512", "avx2"]),
        (BF16 - {"avx512vbmi"}, ["avx512_vnni", "avx512", "avx2"]),
        (BF16, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        (BF16 | {"amx_tile"}, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        (BF16 | TILES, ["amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        (AVX2 | TILES, ["avx2"]),
    ],
)
def test_instruction_sets_follow_the_processor(flags: frozenset[str], names: list[str]) -> None:
    """Order sets from the best; a set with a missing flag is not usable."""
    assert [found.name for found in usable_instruction_sets(flags, request_tiles=lambda: "")] == names


def test_no_instruction_set_at_all() -> None:
    """Name the supported sets if the processor has none of them."""
    with pytest.raises(CannotBuild, match="amx_bf16, avx512_bf16, avx512_vnni, avx512, avx2"):
        usable_instruction_sets(AVX2 - {"fma"})


def test_system_refuses_tiles() -> None:
    """Use the next best set if the system does not permit AMX, even if the processor has it."""
    flags = BF16 | TILES
    assert usable_instruction_sets(flags, request_tiles=lambda: "no permission")[0].name == "avx512_bf16"
    assert usable_instruction_sets(flags, request_tiles=lambda: "")[0].name == "amx_bf16"


def test_forced_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only the forced set; refuse one that does not run here or does not exist, by name."""
    monkeypatch.setenv(FORCED, "avx2")
    assert [found.name for found in usable_instruction_sets(AVX512)] == ["avx2"]
    monkeypatch.setenv(FORCED, "avx512_bf16")
    with pytest.raises(ValueError, match="'avx512_bf16', which cannot run here: the processor lacks avx512_bf16"):
        usable_instruction_sets(AVX512)
    monkeypatch.setenv(FORCED, "amx_bf16")
    with pytest.raises(ValueError, match="'amx_bf16', which cannot run here: no permission"):
        usable_instruction_sets(BF16 | TILES, request_tiles=lambda: "no permission")
    monkeypatch.setenv(FORCED, "sse9")
    with pytest.raises(ValueError, match="'sse9', which is none of amx_bf16"):
        usable_instruction_sets(AVX512)


def test_forced_instruction_set_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a forced set that cannot run here, under `auto` as well, instead of using another."""
    monkeypatch.setenv(FORCED, "sse9")
    for name in ("auto", "cpu"):
        with pytest.raises(ValueError, match=f"{FORCED} is 'sse9'"):
            load_backend(name, backend_config(TINY))


@needs_kernels
def test_next_best_instruction_set_if_compiling_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn once and use the next set if the compiler does not support the best one."""
    usable = usable_instruction_sets(processor_flags())
    unknown = InstructionSet("from_the_future", frozenset(), ("-mfrom-the-future",))
    monkeypatch.setattr(building, "usable_instruction_sets", lambda flags: [unknown, *usable])
    assert load_kernels().instruction_set == usable[0].name
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no kernels for from_the_future" in warnings[0]


@needs_kernels
def test_built_libraries_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Print a line for each instruction set: its file, or why there is none."""
    monkeypatch.setattr(sys, "argv", ["build"])
    assert main() == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [each.name for each in INSTRUCTION_SETS]
    chosen = choose_instruction_set(processor_flags())
    assert str(build(chosen)) in lines.pop(chosen.name)
    assert all(line.startswith("not built: ") for line in lines.values())


def test_compiler_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use only CXX if it is set; explain if there is no compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="no-such-compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match="g\\+\\+"):
        find_compiler()


def test_compiler_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Report the compiler's error, and leave no partial file that could be loaded later."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotBuild, match="no such thing"):
        build(INSTRUCTION_SETS[-1])
    assert list((tmp_path / "cache").rglob("*.so*")) == []


@needs_kernels
def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not compile a cached library again."""
    instruction_set = choose_instruction_set(processor_flags())
    path = build(instruction_set)
    before = path.stat().st_mtime_ns
    assert build(instruction_set) == path
    assert path.stat().st_mtime_ns == before


@needs_kernels
def test_sources_name_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Name libraries by source, headers and flags, so that an outdated one is never loaded."""
    monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = []
    for header, source, flags in [("1", "a", ()), ("2", "a", ()), ("2", "b", ()), ("2", "b", ("-DX",)), ("1", "a", ())]:
        (tmp_path / "one.h").write_text(f"#define ONE {header}\n")
        (tmp_path / "one.cpp").write_text(f'#include "one.h"\nextern "C" int {source}() {{ return ONE; }}\n')
        names.append(build(InstructionSet("none", frozenset(), flags)).name)
    assert len(set(names)) == 4
    assert names[0] == names[4]


@needs_kernels
def test_auto_chooses_cpu_if_it_can_run(caplog: pytest.LogCaptureFixture) -> None:
    """Load the kernels for `auto` and `cpu` without a warning, and report the instruction set."""
    for name in ("auto", "cpu"):
        capabilities = load_backend(name, backend_config(TINY)).capabilities
        best = choose_instruction_set(processor_flags()).name
        assert (capabilities.name, capabilities.instruction_set, capabilities.invariant) == ("cpu", best, True)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_auto_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Fall back to the reference with one warning; refuse `cpu` if requested by name."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(building, "PACKAGED", tmp_path)  # the kernels of a wheel
    # as if on a processor that can run them, so that only the library is missing
    monkeypatch.setattr(building, "usable_instruction_sets", lambda flags: [INSTRUCTION_SETS[-1]])
    assert load_backend("auto", backend_config(TINY)).capabilities.name == "reference"
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no-such-compiler" in warnings[0] and "times slower" in warnings[0]
    with pytest.raises(ValueError, match="no-such-compiler"):
        load_backend("cpu", backend_config(TINY))


@needs_kernels
def test_auto_falls_back_for_unsupported_dtype(caplog: pytest.LogCaptureFixture) -> None:
    """Fall back to the reference for a dtype that the kernels lack, and name it in the warning."""
    config = attrs.evolve(backend_config(TINY), dtype="float16")
    assert load_backend("auto", config).capabilities.name == "reference"
    assert "float16" in caplog.text
    with pytest.raises(ValueError, match="float16"):
        load_backend("cpu", config)


def test_unsupported_checkpoint_is_refused_by_every_executor(tmp_path: Path) -> None:
    """Refuse a checkpoint that no backend supports once, by name, instead of falling back."""
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    for name in ("auto", "cpu", "reference"):
        with pytest.raises(ValueError, match="NoSuchModel"):
            load_backend(name, backend_config(tmp_path))
    with pytest.raises(ValueError, match="unknown backend 'gpu': choose 'auto', 'cpu'"):
        load_backend("gpu", backend_config(tmp_path))
