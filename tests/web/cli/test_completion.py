"""Real shells complete commands, flags, values, files and models with the scripts that `quipu completion` prints.

bash is on every machine that runs these tests; zsh and fish are Debian packages of these names. Without one of them,
its script is still made, and compared with the parsers.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from quipu.web.cli import completion_command
from quipu.web.cli.cli import COMMANDS, main, make_parser
from quipu.web.cli.one_line_parser import actions_of

PATIENCE_S = 60.0
BASH = """
source "$0"
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_shtab_quipu
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = [
    (["l"], {"ledger"}),
    (["ledger", "v"], {"verify", "verify-receipt"}),
    (["serve", "--kv-cache-dt"], {"--kv-cache-dtype"}),
    (["serve", "--metric-names", ""], {"quipu", "vllm"}),
    (["serve", "--data-dir", "w"], {"weights dir"}),
    (["serve", "--key-file", "w"], {"w.json", "weights dir"}),
    (["serve", "Q"], {"Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"}),
    (["serve", "--model", "d"], {"demo"}),
    (["quantize", "w"], {"w.json", "weights dir"}),
    (["bench", "throughput", "--kv-cache-dt"], {"--kv-cache-dtype"}),
    (["run-batch", "--max-num-s"], {"--max-num-seqs"}),
    (["completion", ""], {"bash", "zsh", "fish"}),
]
Shell = Callable[[list[str]], set[str]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in completion_command.SHELLS:
        (folder / shell).write_text(completion_command.make_script(shell))
    return {shell: folder / shell for shell in completion_command.SHELLS}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a home with files and a hub's cache, in which somebody has given a folder a hostile name."""
    for name in ("Qwen--Qwen3-0.6B", "Qwen--Qwen3-4B", "Q--$(touch pwned)", "Q--`touch pwned`", "Q--a b;touch pwned"):
        (tmp_path / f".cache/huggingface/hub/models--{name}").mkdir(parents=True)
    (tmp_path / "weights dir").mkdir()
    (tmp_path / "w.json").touch()
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


def found_by(*command: str | Path, home: Path) -> set[str]:
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(filter(None, done.stdout.split("\n")))


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash(scripts: Mapping[str, Path], home: Path, words: list[str], expected: set[str]) -> None:
    found = found_by("bash", "--norc", "-c", BASH, scripts["bash"], "quipu", *words, home=home)
    assert found == expected
    assert not (home / "pwned").exists()


def has_script_of(path: Path) -> bool:
    """Return whether a script names every command, and a flag of each parser."""
    text = path.read_text()
    flags = {"--kv-cache-dtype", "--dataset-name", "--num-iters-warmup", "--metrics-url", "--bucket"}
    return all(re.search(rf"\b{word}\b", text) for word in [*COMMANDS, *(flag.lstrip("-") for flag in flags)])


def test_fish(scripts: Mapping[str, Path], home: Path) -> None:
    assert has_script_of(scripts["fish"])
    if shutil.which("fish") is None:
        pytest.xfail("fish is not installed: its script was made, and no fish has read it")
    lines = [f"quipu {' '.join(words)}" for words, _ in CASES]
    code = 'source $argv[1]; for line in $argv[2..-1]; echo "== $line"; complete -C $line; end'
    done = subprocess.run(
        ["fish", "--no-config", "-c", code, scripts["fish"], *lines],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = re.split(r"^== .*\n", done.stdout, flags=re.M)[1:]
    for (words, expected), answer in zip(CASES, answers, strict=True):
        found = {line.split("\t")[0].rstrip("/") for line in answer.splitlines()}
        assert {word for word in found if word.startswith(words[-1])} >= expected, words
    assert not (home / "pwned").exists()


def test_zsh(scripts: Mapping[str, Path], home: Path) -> None:
    """zsh completes only what is typed: each line is typed into a terminal, and read from it when it is complete."""
    assert has_script_of(scripts["zsh"])
    if shutil.which("zsh") is None:
        pytest.xfail("zsh is not installed: its script was made, and no zsh has read it")
    typed = {
        "quipu led": "quipu ledger ",
        "quipu serve --kv-cache-dt": "quipu serve --kv-cache-dtype ",
        "quipu serve --data-dir w": "quipu serve --data-dir weights\\ dir/",
        "quipu serve Qwen/Qwen3-0": "quipu serve Qwen/Qwen3-0.6B ",
        "quipu run-batch --max-num-s": "quipu run-batch --max-num-seqs ",
    }
    (home / "functions").mkdir()
    shutil.copy(scripts["zsh"], home / "functions/_quipu")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**environment(home), "TERM": "dumb"})
    try:
        begin = "PS1=; fpath=(~/functions $fpath); autoload -Uz compinit; compinit -u -D; echo be''gun\n"
        os.write(terminal, begin.encode())
        read_until(terminal, "begun")
        for line, completed in typed.items():
            os.write(terminal, f"{line}\t".encode())
            read_until(terminal, completed)
            os.write(terminal, b"\x15")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert not (home / "pwned").exists()


def read_until(terminal: int, text: str) -> None:
    seen, end = "", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096).decode("utf-8", "replace")


def test_metavars() -> None:
    """Each flag whose value is a path says so by its metavar, from which the scripts know what to complete."""
    pending = [make_parser(COMMANDS)]
    while pending:
        parser = pending.pop()
        for action in actions_of(parser):
            if isinstance(action.choices, dict):
                pending += action.choices.values()
            elif action.type is Path or action.dest.endswith(("_dir", "_file")):
                assert action.metavar in {"FILE", "FOLDER", "IN", "OUT"}, f"{parser.prog} {action.dest}"


def test_command(capsys: pytest.CaptureFixture[str], scripts: Mapping[str, Path]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.rstrip() == scripts["bash"].read_text().rstrip()
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "choose from bash, zsh, fish" in capsys.readouterr().err
