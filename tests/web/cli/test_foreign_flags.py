"""Errors about mistyped flags, flags of other servers, and the model: one line each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quipu.actors.shared.checkpoint import CheckpointError, resolve
from quipu.web.cli.cli import main, make_parser
from quipu.web.cli.foreign_flags import ABSENT, CHOICES, NEEDLESS, USE, advice_of
from tests.web.cli.peer_flags import VLLM


def serve_flags() -> set[str]:
    serve = make_parser().parse_args(["serve"]).parser
    return {option for action in serve._actions for option in action.option_strings}  # noqa: SLF001 - no public list


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (("serve", "demo", "--prot", "1"), "--port"),
        (("serve", "--modle", "x"), "--model"),
        (("serve", "demo", "--max_model_len=5"), "--max-model-len"),
        (("serve", "demo", "--enable-prefix-cashing"), "--enable-prefix-caching"),
        (("ledger", "verify", "--data-dri", "x"), "--data-dir"),
        (("bench", "serve", "--modl", "x"), "--model"),
        (("explain", "req-1", "--api-kye", "x"), "--api-key"),
        (("chat", "--bas-url", "x"), "--base-url"),
        (("usage", "--bucktes", "x"), "--bucket"),
    ],
)
def test_nearest_flag(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], near: str) -> None:
    """An unknown flag of any command is answered with the nearest one."""
    assert f"did you mean {near}?" in refused(capsys, *argv)


@pytest.mark.parametrize("argv", [("serve", "--port", "x"), ("serve", "a", "b"), ("serv",), ("serve", "--z" * 500)])
def test_other_mistakes(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    """Every other mistake is also answered in one line, without the usage."""
    said = refused(capsys, *argv)
    assert "error: " in said and len(said) < 400


def test_flags_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names each of them; flags that it recommends exist, and no flag of quipu's own is in the tables."""
    ours = serve_flags()
    for flag, words in (USE | NEEDLESS | ABSENT).items():
        assert flag not in ours, flag
        assert set(re.findall(r"--[a-z-]+", words)) <= ours, flag
        assert f"error: {flag} is " in refused(capsys, "serve", "demo", flag, "2"), flag
        assert f"error: {flag} is " in refused(capsys, "serve", "--model", "demo", flag, "2"), "2 is no second model"
    assert "not needed" in refused(capsys, "serve", "demo", "--no-enable-chunked-prefill")


def test_every_flag_of_vllm_is_decided() -> None:
    """No flag of vLLM's is unknown: quipu has it too, or says what to do instead, also of its negative form."""
    others = VLLM - serve_flags()
    assert len(others) > 250 and "--max-model-len" in VLLM - others
    assert not [flag for flag in others if advice_of(flag) is None]
    assert advice_of("--no-enable-log-outputs") == advice_of("--enable-log-outputs")
    assert advice_of("--default_chat_template_kwargs") is not None
    assert advice_of("-O3") == advice_of("-O.level") == advice_of("--compilation-config.level") == advice_of("-cc")


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ((), "demo"),
        (("a",), "a"),
        (("--model", "a"), "a"),
        (("--model=a", "--port", "1"), "a"),
        (("--model-path", "a"), "a"),
        (("a", "--model", "a"), "a"),
        (("--port", "1", "a"), "a"),
    ],
)
def test_model_as_a_flag(argv: tuple[str, ...], model: str) -> None:
    """`--model`, as for vLLM, is the same as the argument."""
    assert make_parser().parse_args(["serve", *argv]).model == model


@pytest.mark.parametrize("argv", [("a", "--model", "b"), ("--model", "b", "a"), ("demo", "--model", "b")])
def test_two_models(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    """Two different models are refused."""
    assert "two models are named" in refused(capsys, "serve", *argv)


def test_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error about a misspelled model names one that exists."""
    (tmp_path / "Llama-3-8B").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, hint in (
        (str(tmp_path / "llama-3-8b-"), f"did you mean {tmp_path / 'Llama-3-8B'}?"),
        ("./Lama-3-8B", "did you mean Llama-3-8B?"),
        ("dmeo", "did you mean demo?"),
        ("/nowhere/at/all", "`demo` is part of the package"),
    ):
        with pytest.raises(CheckpointError) as error:
            resolve(model)
        assert str(error.value).endswith(hint)


def test_help_is_grouped() -> None:
    """The flags of `quipu serve` are in groups; among the ungrouped ones are only help and the model."""
    text = make_parser().parse_args(["serve"]).parser.format_help()
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert "several engines, and routing" in titles and len(titles) > 8
    ungrouped = text[text.index("\noptions:") : text.index("\nserver:")]
    assert set(re.findall(r"^  (-\S+)", ungrouped, re.MULTILINE)) <= {
        "-h,",
        "--model",
        "--model,",
    }  # Python 3.13 writes it with a comma


@pytest.mark.parametrize(
    ("value", "words"),
    [("eagle", "heads .* not loaded"), ("EAGLE3", "EAGLE"), ("mtp", "heads"), ("draft_model", "--draft-model")],
)
def test_choices_of_other_servers(capsys: pytest.CaptureFixture[str], value: str, words: str) -> None:
    """A method of drafting that other servers have is refused by name, with what there is instead."""
    assert re.search(f"'{value}'; .*{words}", refused(capsys, "serve", "demo", "--speculative", value))
    ours = serve_flags()
    for setting, advice in CHOICES.items():
        assert f"--{setting.replace('_', '-')}" in ours
        assert all(set(re.findall(r"--[a-z-]+", words)) <= ours for words in advice.values())
