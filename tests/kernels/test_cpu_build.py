"""Which backend runs: what is compiled, what is kept, and that a machine without kernels still serves."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
import pytest
from cpu_backends import needs_kernels
from kernel_checkpoints import DEMO, backend_config

from quipu.kernels.backend import load_backend
from quipu.kernels.cpu import build as building
from quipu.kernels.cpu.build import CannotBuild, build, choose_instruction_set, find_compiler, processor_flags

AVX2 = frozenset({"sse2", "avx2", "fma"})


def test_instruction_set_follows_the_processor(tmp_path: Path) -> None:
    """Flags are read as the kernel of the system writes them; a processor with too little is told apart."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 fma avx2\nprocessor : 1\nflags\t\t: fpu\n")
    assert choose_instruction_set(processor_flags(cpuinfo)).name == "avx2"
    with pytest.raises(CannotBuild, match="avx2"):
        choose_instruction_set(AVX2 - {"fma"})
    assert processor_flags(tmp_path / "missing") == frozenset()


def test_compiler_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CXX alone decides where it is set; without it and without a compiler the reason is said."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="no-such-compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match="g\\+\\+"):
        find_compiler()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its complaint is told, and nothing half-written is left to be loaded next time."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotBuild, match="no such thing"):
        build(choose_instruction_set(AVX2))
    assert list((tmp_path / "cache").rglob("*.so*")) == []


@needs_kernels
def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that stands in the cache is not compiled again."""
    instruction_set = choose_instruction_set(processor_flags())
    path = build(instruction_set)
    before = path.stat().st_mtime_ns
    assert build(instruction_set) == path
    assert path.stat().st_mtime_ns == before


@needs_kernels
def test_sources_name_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed source is another library: an old one is never taken for it."""
    changed = tmp_path / "csrc"
    changed.mkdir()
    for path in building.SOURCES.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "program.h").write_text("#error changed\n")
    monkeypatch.setattr(building, "SOURCES", changed)
    with pytest.raises(CannotBuild, match="changed"):
        build(choose_instruction_set(processor_flags()))


@needs_kernels
def test_auto_is_cpu_where_it_can_run(caplog: pytest.LogCaptureFixture) -> None:
    """`auto` and `cpu` load the kernels, without a warning; the instruction set is told."""
    for name in ("auto", "cpu"):
        capabilities = load_backend(name, backend_config(DEMO)).capabilities
        assert (capabilities.name, capabilities.instruction_set, capabilities.invariant) == ("cpu", "avx2", True)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_auto_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The reference runs and one warning says why and what it costs; asked for by name, `cpu` is refused."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_backend("auto", backend_config(DEMO)).capabilities.name == "reference"
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no-such-compiler" in warnings[0] and "times slower" in warnings[0]
    with pytest.raises(ValueError, match="no-such-compiler"):
        load_backend("cpu", backend_config(DEMO))


@needs_kernels
def test_auto_with_a_dtype_of_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    """What the kernels do not compute the reference does, and the warning names it."""
    config = attrs.evolve(backend_config(DEMO), dtype="float16")
    assert load_backend("auto", config).capabilities.name == "reference"
    assert "float16" in caplog.text
    with pytest.raises(ValueError, match="float16"):
        load_backend("cpu", config)


def test_what_nobody_runs_is_refused_by_both(tmp_path: Path) -> None:
    """A checkpoint that no backend understands is no reason to fall back: it is refused, once, by name."""
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    for name in ("auto", "cpu", "reference"):
        with pytest.raises(ValueError, match="NoSuchModel"):
            load_backend(name, backend_config(tmp_path))
    with pytest.raises(ValueError, match="'auto', 'cpu', 'reference'"):
        load_backend("gpu", backend_config(tmp_path))
