"""`quipu doctor` says what is wrong with a machine, and what to do."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from quipu.actors.ledger.folder import LedgerFolder
from quipu.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from quipu.web.cli.cli import main
from quipu.web.cli.doctor.findings import Finding, Verdict, lines_of, summary_of
from quipu.web.cli.doctor.machine_checks import check_clock, check_gpu, check_kernels, check_memory, check_processor
from quipu.web.cli.doctor.place_checks import check_data_dir, check_files, check_packages, check_port, check_python

GIB_IN_KB = 1 << 20
AVX2 = INSTRUCTION_SETS[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Make a root with files of a machine."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def test_processors(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIPU_CPU_ISA", raising=False)
    root = machine({"proc/cpuinfo": f"flags : {' '.join(AVX2.needs)}\n"})
    finding = check_processor(root)
    assert finding.verdict is Verdict.OK and "avx2" in finding.text and "the processor lacks" in finding.text
    machine({"proc/cpuinfo": "flags : sse2\n"})
    assert check_processor(root).verdict is Verdict.PROBLEM
    assert check_kernels(root, root).verdict is Verdict.PROBLEM


def test_kernels(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIPU_CPU_ISA", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    root = machine({"proc/cpuinfo": f"flags : {' '.join(AVX2.needs)}\n"})
    finding = check_kernels(root / "lib", root)
    assert finding.verdict is Verdict.PROBLEM and "no-such-compiler" in finding.text and finding.advice
    machine({f"lib/quipu-cpu-{AVX2.name}.so": ""})
    assert check_kernels(root / "lib", root) == Finding("kernels", "part of the package")


@pytest.mark.parametrize(
    ("gib", "pages", "verdict", "said"),
    [
        (8, "always [madvise] never", Verdict.OK, "8.0 GiB of 16.0 GiB"),
        (8, "always madvise [never]", Verdict.WARNING, "without large pages"),
        (1, "always [madvise] never", Verdict.WARNING, "1.0 GiB"),
    ],
)
def test_memory(machine: Callable[..., Path], gib: int, pages: str, verdict: Verdict, said: str) -> None:
    text = f"MemTotal: {16 * GIB_IN_KB} kB\nMemAvailable: {gib * GIB_IN_KB} kB\n"
    root = machine({"proc/meminfo": text, "sys/kernel/mm/transparent_hugepage/enabled": pages})
    finding = check_memory(root)
    assert finding.verdict is verdict and said in finding.text and bool(finding.advice) is (verdict is not Verdict.OK)


def test_memory_that_cannot_be_read(tmp_path: Path) -> None:
    assert check_memory(tmp_path).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("files", "torch_version", "advised"),
    [
        ([], "2.13.0+cpu", ""),
        ([], "2.13.0+cu128", "tenth of the size"),
        (["dev/nvidia0"], "2.13.0+cu128", "driver is not loaded"),
        (["dev/nvidia0", "proc/driver/nvidia/version"], "2.13.0+cpu", "CUDA build"),
        (["dev/nvidia0", "proc/driver/nvidia/version"], "2.13.0+cu128", ""),
    ],
)
def test_gpus(machine: Callable[..., Path], files: list[str], torch_version: str, advised: str) -> None:
    finding = check_gpu(torch_version, {}, machine(dict.fromkeys(files, "")))
    assert advised in finding.advice and (finding.verdict is Verdict.WARNING) is bool(advised)


def test_clocks() -> None:
    assert check_clock(lambda: 1e9, lambda: 0).verdict is Verdict.PROBLEM
    assert check_clock(lambda: 2e9, lambda: 5).advice
    assert check_clock(lambda: 2e9, lambda: 0) == Finding("clock", "2033-05-18 03:33:20 UTC")


def test_port_in_use() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert check_port("127.0.0.1", listening.getsockname()[1]).verdict is Verdict.WARNING
    assert check_port("127.0.0.1", 0).verdict is Verdict.OK
    assert check_port("192.0.2.1", 0).verdict is Verdict.PROBLEM, "an address that no machine has"


def test_data_directories(tmp_path: Path) -> None:
    assert "will be made" in check_data_dir(tmp_path / "one" / "two").text
    assert not (tmp_path / "one").exists()
    with LedgerFolder(tmp_path / "used").locked():
        assert "server that runs" in check_data_dir(tmp_path / "used").text
    (tmp_path / "file").write_text("")
    finding = check_data_dir(tmp_path / "file")
    assert finding.verdict is Verdict.PROBLEM and finding.advice


def test_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 256))
    assert check_files().verdict is Verdict.WARNING
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    assert check_files() == Finding("files", "no limit")


def test_packages_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_packages().verdict is Verdict.OK
    stated = ["attrs<1", "no-such-package>=1", "pytest<1; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda _: stated)
    finding = check_packages()
    assert finding.verdict is Verdict.PROBLEM
    assert "attrs is " in finding.text and "no-such-package is missing" in finding.text and "pytest" not in finding.text
    assert check_python((3, 12)).verdict is Verdict.OK and check_python((3, 14)).verdict is Verdict.WARNING


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1 only for what must be fixed; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--port", "0", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert len(findings) == 11 and findings["data"]["verdict"] == findings["port"]["verdict"] == "ok"
    assert code == any(finding["verdict"] == "problem" for finding in findings.values())
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--port", "0", "--data-dir", "file"]) == 1
    out = capsys.readouterr().out
    assert "problem  data " in out and "to fix first" in out and "\x1b" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lines() -> None:
    """Control characters are not passed on, and only the verdict is coloured."""
    finding = Finding("data", "a\x1bb", Verdict.WARNING, "do \x07it")
    assert list(lines_of([finding], colored=True)) == [
        "\x1b[33mwarning \x1b[0m data       a?b",
        "                    → do ?it",
    ]
    assert summary_of([finding]).startswith("quipu runs here, with 1 warning.")
