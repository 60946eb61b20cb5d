"""The flags of a draft model: what it needs, and which checkpoints and settings are refused, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli.cli import make_parser
from quipu.web.cli.settings import resolve_config
from tests.tiny import TINY

COSTS = ["--speculative-costs", "1:20,8:21"]
MODEL_COSTS = ["--draft-model-costs", "1:4,8:5"]


def draft_folder(folder: Path, *, without_token: str | None = None, **entries: object) -> Path:
    """Make a checkpoint like the tiny one, with other entries of config.json."""
    folder.mkdir()
    for path in TINY.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    if without_token is not None:
        text = (TINY / "tokenizer.json").read_text()
        assert text.count(f'"{without_token}"') >= 1
        (folder / "tokenizer.json").write_text(text.replace(f'"{without_token}"', f'"{without_token}s"'))
    return folder


def resolved(*flags: str) -> tuple[str, str | None, object]:
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    return config.engine.speculative, config.engine.draft_model, info.settings["draft_model"]


@pytest.mark.parametrize("flags", [[], ["--executor", "reference"], ["--executor", "cpu", *COSTS, *MODEL_COSTS]])
def test_draft_model(tmp_path: Path, flags: list[str]) -> None:
    """With a draft model, guesses from texts are on as well."""
    folder = str(draft_folder(tmp_path / "draft", num_hidden_layers=1))
    assert resolved("--draft-model", folder, *flags) == ("suffix", folder, folder)
    assert resolved("--draft-model", folder, "--speculative", "ngram", *flags) == ("ngram", folder, folder)
    assert resolved() == ("suffix", None, None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--speculative", "off"], "with off nothing is verified"),
        (["--executor", "vllm"], "the vllm executor runs none"),
        (["--executor", "transformers"], "the transformers executor runs none"),
        (["--executor", "fake"], "the fake executor runs none"),
        (["--task", "embed"], "nothing is drafted without outputs"),
        (COSTS, "both --speculative-costs and --draft-model-costs"),
        (MODEL_COSTS, "both --speculative-costs and --draft-model-costs"),
    ],
)
def test_refused_settings(tmp_path: Path, flags: list[str], reason: str) -> None:
    """What a draft model cannot be combined with is refused."""
    with pytest.raises(CheckpointError, match=reason):
        resolved("--draft-model", str(draft_folder(tmp_path / "draft")), *flags)


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
def test_drafts_that_vllm_cannot_verify(speculative: str) -> None:
    """They are refused before anything is loaded, with what serves them instead; `off` is not."""
    with pytest.raises(CheckpointError, match=f"--speculative {speculative}: .* --upstream"):
        resolved("--executor", "vllm", "--speculative", speculative)
    assert resolved("--executor", "vllm", "--speculative", "off") == ("off", None, None)


def test_costs_of_none() -> None:
    """The costs of a draft model that is not there are refused."""
    with pytest.raises(CheckpointError, match="--draft-model-costs needs --draft-model"):
        resolved(*COSTS, *MODEL_COSTS)


def test_refused_checkpoints(tmp_path: Path) -> None:
    """A draft model must have the same tokens, and read texts as long."""
    more = draft_folder(tmp_path / "more", vocab_size=4224)
    shorter = draft_folder(tmp_path / "shorter", max_position_embeddings=1024)
    token = next(
        token for token in json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"] if len(token) > 6
    )
    others = draft_folder(tmp_path / "others", without_token=token)
    for folder, reason in (
        (more, "a vocabulary of 4224 tokens, and tiny of 4096"),
        (shorter, "reads up to 1024 tokens, and --max-model-len is 16384"),
        (others, "has other tokens than tiny"),
        (tmp_path / "none", "neither a folder nor a hub id"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            resolved("--draft-model", str(folder))
    assert resolved("--draft-model", str(shorter), "--max-model-len", "1024")[1] == str(shorter)
