"""Serving other checkpoints, from a folder or by hub id, compared with transformers."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from quipu.actors.shared.checkpoint import resolve
from tests.e2e.servers import run_quipu, serve_command, serving
from tests.kernels.checkpoints.gguf_files import write_gguf
from tests.tiny import TINY

PROMPT = list(range(300, 340))
CLEAR_MARGIN = 1e-3
"""Minimum difference between the largest logit and the next; float32 rounding is a hundredth of it."""
SIZES = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "bos_token_id": 0}


def save_checkpoint(folder: Path, config: PreTrainedConfig) -> list[int]:
    """Save random weights in several files, and `TINY`'s tokenizer; return transformers' greedy output for PROMPT.

    The weights are chosen so that every top token leads by a clear margin, because other sums round differently.
    """
    for seed in count():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.08)
        generated = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=20,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(generated.logits).topk(2).values
        if float((best[..., 0] - best[..., 1]).min()) > CLEAR_MARGIN:
            break
    model.save_pretrained(folder, max_shard_size="500KB")
    assert (folder / "model.safetensors.index.json").exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return [int(token_id) for token_id in generated.sequences[0][len(PROMPT) :]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A small Llama with scaled rope and untied embeddings, and its greedy output for PROMPT."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = LlamaConfig(
        **SIZES,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters=scaling,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    return folder, save_checkpoint(folder, config)


def check_answers(folder: Path, token_ids: list[int], here: Path) -> None:
    """Check that in float32 the greedy text is transformers', cold and from the cache."""
    expected = AutoTokenizer.from_pretrained(folder).decode(token_ids)
    with serving(here, str(folder), "--dtype", "float32", "--num-blocks", "200") as server:
        for cached in (0, 32):
            answer = server.complete(PROMPT, 20, model=folder.name).json()
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_llama(llama: tuple[Path, list[int]], tmp_path: Path) -> None:
    """A Llama checkpoint generates the same text as in transformers, cached or not."""
    check_answers(*llama, tmp_path / "here")


def test_sliding_window(tmp_path: Path) -> None:
    """A model that mixes windows of 20 tokens with full attention generates transformers' text, cached or not.

    The cached prefix is longer than a window.
    """
    config = Gemma3TextConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
        final_logit_softcapping=20.0,
        max_position_embeddings=2048,
        eos_token_id=2,
    )
    folder = tmp_path / "tiny-gemma"
    check_answers(folder, save_checkpoint(folder, config), tmp_path / "here")


def test_dummy_weights(llama: tuple[Path, list[int]], tmp_path: Path) -> None:
    """`--load-format dummy` needs only config.json and a tokenizer."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama[0] / name, bare)
    with serving(bare, str(bare), "--load-format", "dummy", "--num-blocks", "100") as server:
        assert server.complete(PROMPT, 5, model="bare").status_code == 200
        assert server.get("/server_info").json()["settings"]["load_format"] == "dummy"


def test_entries_that_are_not_understood(tmp_path: Path) -> None:
    """A server does not start with such an entry, and names it and the flag; with the flag it starts and shows it."""
    folder = tmp_path / "odd"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | {"attention_gate": "sigmoid", "new_norm": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"damaged")
    for flags, told in (
        ((), "entries that are not understood: attention_gate, new_norm."),
        (("--ignore-config-entries", "attention_gate"), "entries that are not understood: new_norm."),
        (("--ignore-config-entries", "attention_gate,new_norm,vocab_size"), "vocab_size is no entry"),
        (("--ignore-config-entries", "new_norm,,"), "must be different names with commas between them"),
    ):
        ended = run_quipu(*serve_command(str(folder), *flags), "--port", "0", folder=tmp_path)
        assert ended.returncode in (1, 2) and "Traceback" not in ended.stderr
        assert told in ended.stderr, ended.stderr
    (folder / "model.safetensors").write_bytes(weights)
    named = ("--ignore-config-entries", "attention_gate,new_norm", "--num-blocks", "100")
    with serving(tmp_path / "here", str(folder), *named) as server:
        assert server.complete(PROMPT, 5, model="odd").status_code == 200
        shown = server.get("/server_info").json()["settings"]["ignore_config_entries"]
        assert shown == ["attention_gate", "new_norm"]


def test_an_entry_that_is_no_text(tmp_path: Path) -> None:
    """An engine says why it refuses a checkpoint even if its files have halves of characters, which cannot be sent."""
    folder = tmp_path / "odd"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | {"half \ud800": 1}
    (folder / "config.json").write_text(json.dumps(config))
    ended = run_quipu(*serve_command(str(folder)), "--port", "0", folder=tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert r"entries that are not understood: half \ud800." in ended.stderr, ended.stderr


def test_gguf_file(tmp_path: Path) -> None:
    """A GGUF file is served from its keys and tensors alone, with the tokens of the checkpoint it was made from."""
    file = tmp_path / "small-q8.gguf"
    write_gguf(file, "qwen3", TINY, types={"proj": "Q8_0"}, tokenizer=TINY)
    with serving(tmp_path / "gguf", str(file), "--quantization", "int8", "--num-blocks", "100") as server:
        answer = server.complete("The cat sat on", 5, model="small-q8")
        assert answer.status_code == 200
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        assert answer.json()["usage"]["prompt_tokens"] == len(tokenizer("The cat sat on").input_ids)
        info = server.get("/server_info").json()
        assert info["engine"]["weights"] == "q8_0"
        assert info["settings"]["quantization"] == "int8"


def test_gguf_in_parts(tmp_path: Path) -> None:
    """A model in several files is served from any of them, under the name that they share."""
    write_gguf(tmp_path / "small.gguf", "qwen3", TINY, types={"proj": "Q8_0"}, tokenizer=TINY, tensors_each=9)
    *_, last = sorted(tmp_path.glob("small-*.gguf"))
    with serving(tmp_path / "gguf", str(last), "--num-blocks", "100") as server:
        assert server.complete("The cat sat on", 5, model="small").status_code == 200
        assert server.get("/server_info").json()["engine"]["weights"] == "q8_0"


def test_hub_id_from_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id resolves to its snapshot; without a network, to one that was downloaded before."""
    import huggingface_hub.constants

    snapshot = tmp_path / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({}))
    refs = tmp_path / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("owner/model").resolve() == snapshot.resolve()
