"""`quipu quantize`: `compressed-tensors` and our own loader read what is written, and nothing is overwritten."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quipu.kernels.checkpoints import rewriting
from quipu.kernels.checkpoints.quantized import QuantizedLayout, quantize
from quipu.kernels.checkpoints.rewriting import rewrite
from quipu.kernels.checkpoints.weights import open_weights
from quipu.kernels.models.config import read_config
from quipu.web.cli.cli import main
from tests.kernels.checkpoints.gguf_files import load_tensors
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.tiny import TINY

EMBED = "model.embed_tokens.weight"


def write_bfloat16(checkpoint: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint in bfloat16."""
    folder.mkdir()
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in load_tensors(checkpoint).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_others_read_the_same(tmp_path: Path, checkpoints: dict[str, Path], name: str, form: str) -> None:
    """Let `compressed-tensors` decompress every matrix to exactly our numbers, and leave plain tensors as they are."""
    source = write_bfloat16(checkpoints[name], tmp_path / "in")
    done = rewrite(source, read_config(source), tmp_path / "out", form, max_shard_bytes=10**9)
    plain, stored = load_tensors(source), load_file(tmp_path / "out" / "model.safetensors")
    config = QuantizationConfig.model_validate(read_config(tmp_path / "out")["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    num_quantized = 0
    for tensor_name, tensor in plain.items():
        module = tensor_name.removesuffix("weight")
        parts = {part.removeprefix(module): stored[part] for part in stored if part.startswith(f"{tensor_name}_")}
        if not parts:
            assert torch.equal(stored[tensor_name], tensor), tensor_name
            continue
        num_quantized += 1
        if tensor_name in stored:
            parts["weight"] = stored[tensor_name]
        width = tensor.shape[1]
        layout = (
            QuantizedLayout(4, 32, has_offsets=False)
            if form == "int4"
            else QuantizedLayout(8, width, has_offsets=False)
        )
        expected = quantize(tensor, layout, scale_dtype=torch.bfloat16).dequantized().bfloat16()
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], expected), tensor_name
    assert num_quantized == done.num_quantized > 10
    assert EMBED in stored
    # widths of 40 are not divisible by 32
    assert bool(done.kept) == (name == "qwen3-moe" and form == "int4")


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "llama4", "gemma3n-plain"])
def test_our_loader_serves_it(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    """Serve what was written, in several files, as the numbers that were written, and say what it is made for."""
    source = write_bfloat16(checkpoints[name], tmp_path / "in")
    rewrite(source, read_config(source), tmp_path / "out", "w8a8", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    config = read_config(tmp_path / "out")
    opened, _ = open_weights(tmp_path / "out", config, load_format="auto", dtype="auto")
    assert opened.activations == "int8"
    row = make_batch({"token_ids": prompt(20, seed=1), "position": 0, "blocks": scattered_blocks(2, seed=1)})
    backend = make_backend(tmp_path / "out")
    assert backend.capabilities.weights == "int8"
    expected, found = make_backend(source).logits(row, [19]), backend.logits(row, [19])
    assert 0 < (expected - found).norm() / expected.norm() < 0.1


def test_pieces_are_written_alike(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the same bytes whatever the pieces."""
    rewrite(checkpoints["llama"], read_config(checkpoints["llama"]), tmp_path / "a", "int4", max_shard_bytes=10**9)
    monkeypatch.setattr(rewriting, "QUANTIZED_PIECE", 700)
    rewrite(checkpoints["llama"], read_config(checkpoints["llama"]), tmp_path / "b", "int4", max_shard_bytes=10**9)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copy the tokenizer and all other files; refuse to overwrite a folder, or to quantize twice."""
    out = tmp_path / "out"
    assert main(["quantize", str(TINY), str(out), "--format", "int4-g32"]) == 0
    assert f"matrices as int4-g32 in {out}" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (TINY / name).read_bytes()
    before = (out / "config.json").read_bytes()
    assert main(["quantize", str(TINY), str(out), "--format", "int8"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (out / "config.json").read_bytes() == before
    assert main(["quantize", str(out), str(tmp_path / "again"), "--format", "int8"]) == 1
    assert "is quantized already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert main(["quantize", str(TINY), str(tmp_path / "link"), "--format", "int8"]) == 1
    assert "link exists already" in capsys.readouterr().err


def test_folders_are_copied(tmp_path: Path) -> None:
    """Files in folders belong to a checkpoint too, such as more chat templates; weights in other formats do not."""
    source = tmp_path / "in"
    shutil.copytree(TINY, source)
    for name in ("additional_chat_templates/rag.jinja", "onnx/model.onnx", ".cache/x.json"):
        (source / name).parent.mkdir()
        (source / name).write_text("x")
    rewrite(source, read_config(source), tmp_path / "out", "int8", max_shard_bytes=10**9)
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").read_text() == "x"
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"additional_chat_templates"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"architectures": ["OPTForCausalLM"]}', "unsupported architecture (OPTForCausalLM)"),
        ("[]", "config.json is not a JSON object"),
        ("{", "config.json is not JSON"),
    ],
)
def test_unsupported_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, told: str) -> None:
    """A model that is not served is not written: other readers would expect more quantized matrices than it has."""
    source = tmp_path / "in"
    shutil.copytree(TINY, source)
    (source / "config.json").write_text(config)
    assert main(["quantize", str(source), str(tmp_path / "out"), "--format", "int8"]) == 1
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_entries_that_are_not_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose configuration is not understood is written only if its entries are named."""
    source = tmp_path / "in"
    shutil.copytree(TINY, source)
    (source / "config.json").write_text(json.dumps(read_config(TINY) | {"odd": 1}))
    command = ["quantize", str(source), str(tmp_path / "out"), "--format", "int8"]
    assert main(command) == 1
    assert "entries that are not understood: odd" in capsys.readouterr().err
    assert main([*command, "--ignore-config-entries", "odd"]) == 0
    assert read_config(tmp_path / "out")["odd"] == 1


SIGNALLED = f"""
import json, os, signal, sys
from pathlib import Path
from quipu.kernels.checkpoints import rewriting
from quipu.web.cli.cli import main

def run(folder, number, action):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, action)
    write = rewriting._write
    def signalled(*args):
        write(*args)
        os.kill(os.getpid(), number)
    rewriting._write = signalled
    log = os.open(folder.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.exit(main(["quantize", {str(TINY)!r}, str(folder / "out"), "--format", "int8"]))

codes = {{}}
for name, number, action in json.loads(sys.argv[2]):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    if not (pid := os.fork()):
        run(folder, number, action)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""
"""Runs the command once for each signal, which it gets after its first tensor, in children of a process that has loaded
torch."""


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str, list[Path]]]:
    """Return the exit code of the command, what it printed and what it left, by the name of a signal."""
    root = tmp_path_factory.mktemp("signalled")
    cases = [(number.name, number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    cases.append(("ignored", signal.SIGHUP, signal.SIG_IGN))
    command = [sys.executable, "-c", SIGNALLED, str(root), json.dumps(cases)]
    codes = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return lambda name: (codes[name], (root / f"{name}.log").read_text(), list((root / name).iterdir()))


def test_hangups_that_are_ignored(signalled: Callable[[str], tuple[int, str, list[Path]]]) -> None:
    """A command that was started to outlive its terminal, as with nohup, continues."""
    code, printed, (out,) = signalled("ignored")
    assert code == 0 and (out / "config.json").is_file(), printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted(
    signalled: Callable[[str], tuple[int, str, list[Path]]], number: signal.Signals, code: int
) -> None:
    """A command that is ended leaves nothing behind, and prints no traceback."""
    ended, printed, left = signalled(number.name)
    assert ended == code and "Traceback" not in printed, printed
    assert ("was not written" in printed) == (number is signal.SIGINT)
    assert left == []


def test_nothing_is_left_of_a_failure(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Leave no folder behind if a tensor cannot be read."""
    source = write_bfloat16(checkpoints["llama"], tmp_path / "in")
    tensors = load_tensors(source)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has a value that is not finite"):
        rewrite(source, read_config(source), tmp_path / "out", "int4", max_shard_bytes=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_transformers_reads_it(tmp_path: Path, form: str) -> None:
    """Load the folder with transformers as it is: every matrix is the one that our loader reads."""
    rewrite(TINY, read_config(TINY), tmp_path / "out", form, max_shard_bytes=1_000_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs(torch.tensor([[1, 2]]))  # decompresses
    ours, _ = open_weights(tmp_path / "out", read_config(tmp_path / "out"), load_format="auto", dtype="auto")
    for name, tensor in theirs.state_dict().items():
        if name.endswith(".weight") and name != "lm_head.weight":
            assert torch.equal(ours.tensor(name, tuple(tensor.shape)), tensor), name
    ours.check_all_used()
