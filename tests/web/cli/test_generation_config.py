"""`--generation-config`: which sampling defaults a checkpoint may suggest, and what requests get."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.actors.messages.sampling import LogitRules
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.app import make_app
from quipu.web.cli.cli import make_parser
from quipu.web.cli.generation_config import read_sampling_defaults
from quipu.web.cli.settings import resolve_config
from tests.tiny import TINY
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk

SUGGESTED = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
    "max_new_tokens": 2048, "eos_token_id": 2,
}  # fmt: skip
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/responses": {"input": "p"},
    "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4},
}


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [1, 2]),
        ("begin_suppress_tokens", [220]),
        ("bad_words_ids", [[1, 2]]),
        ("sequence_bias", [[[1], -10.0]]),
        ("forced_bos_token_id", 0),
        ("forced_eos_token_id", [2]),
        ("stop_strings", "###"),
        ("min_length", 1),
        ("min_new_tokens", 4),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 0.1),
        ("top_h", 0.4),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("watermarking_config", {"bias": 2.0}),
        ("token_healing", True),
        ("dola_layers", "high"),
    ],
)
def test_what_would_change_an_answer(tmp_path: Path, key: str, value: object) -> None:
    """An entry that changes tokens or ends in transformers and is not served is refused by name, unless ignored."""
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} .*--generation-config vllm ignores"):
        read_sampling_defaults("auto", write(tmp_path, **{key: value}), 100)
    assert read_sampling_defaults("vllm", tmp_path, 100) == {}


def test_entries_without_effect(tmp_path: Path) -> None:
    """Defaults of transformers, and lengths, which requests say themselves, are not refused."""
    neutral: dict[str, Any] = {
        "suppress_tokens": None, "bad_words_ids": [], "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1,
        "typical_p": 1.0, "epsilon_cutoff": 0.0, "guidance_scale": None, "token_healing": False, "penalty_alpha": 0,
        "max_length": 4096, "max_new_tokens": 512, "do_sample": False, "pad_token_id": 0,
        "length_penalty": 2.0, "use_cache": True, "transformers_version": "4.40", "_from_model_config": True,
    }  # fmt: skip
    assert read_sampling_defaults("auto", write(tmp_path, **neutral), 100) == {}


def test_where_defaults_come_from(tmp_path: Path) -> None:
    """The checkpoint's file is read, another folder's if one is given, and none for `vllm` or where there is none."""
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    write(checkpoint, **SUGGESTED)
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", temperature=0.1)

    def shown(*flags: str) -> object:
        _, info = resolve_config(make_parser().parse_args(["serve", str(checkpoint), *flags]))
        assert info.sampling_defaults == info.settings["sampling_defaults"]
        return info.sampling_defaults

    assert shown() == shown("--generation-config", "auto") == DEFAULTS
    assert shown("--generation-config", "vllm") == {}
    assert shown("--generation-config", str(other)) == {"temperature": 0.1}
    (checkpoint / "generation_config.json").unlink()
    assert shown() == {}
    with pytest.raises(CheckpointError, match=r"generation_config\.json does not exist"):
        shown("--generation-config", str(tmp_path))


def test_neutral_values_are_no_defaults(tmp_path: Path) -> None:
    """What a checkpoint says like the server is left out; a `top_k` beyond the vocabulary means all of it."""
    neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": None, "repetition_penalty": 1.0}
    assert read_sampling_defaults("auto", write(tmp_path, **neutral), 100) == {}
    assert read_sampling_defaults("auto", write(tmp_path, temperature=0, top_k=500), 100) == {
        "temperature": 0.0, "top_k": 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be between 0 and 2, not -1"),
        ("temperature", "warm", "temperature must be a number, not 'warm'"),
        ("temperature", True, "temperature must be a number, not True"),
        ("top_p", 1.5, "top_p must be between 0 and 1, not 1.5"),
        ("top_k", 1.5, "top_k must be an integer, not 1.5"),
        ("repetition_penalty", float("nan"), "repetition_penalty must be greater than 0, not nan"),
        ("repetition_penalty", 10**400, "0000..., must be at most 1e+15"),
    ],
)
def test_impossible_suggestions(tmp_path: Path, field: str, value: Any, message: str) -> None:
    """A value that no request could send stops the server at start; the error names the way out."""
    with pytest.raises(CheckpointError, match="--generation-config vllm ignores the file") as caught:
        read_sampling_defaults("auto", write(tmp_path, **{field: value}), 100)
    assert message in str(caught.value)


@pytest.mark.parametrize("path", BODIES)
async def test_requests_get_the_defaults(path: str) -> None:
    """A request without the fields gets the defaults on every endpoint; what it sends itself, 0 included, is kept."""
    desk = FakeDesk(info=attrs.evolve(INFO, sampling_defaults=DEFAULTS))
    client = Client(make_app(desk))
    for sent in ({}, {"temperature": 0, "top_p": 1, "top_k": 0}):
        exchange, answer = await client.post(path, {"model": "tiny", **BODIES[path], **sent})
        assert exchange.status == 200, answer
    without, given = (ticket.encode.sampling for ticket in desk.tickets)
    assert (without.temperature, without.top_p, without.top_k, without.min_p) == (0.6, 0.95, 20, 0.05)
    assert without.rules == given.rules == LogitRules(repetition_penalty=1.05)
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.0, 1.0, 0, 0.05)
