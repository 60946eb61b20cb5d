"""Whatever a GGUF file contains, it is read or refused by name, in bounded time and memory; nothing else is raised.

Files are drawn key by key: the keys of a small model, some of them replaced by values of any type and size.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.output_format import choose_format
from quipu.actors.shared.checkpoint import read_info, resolve
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.encoder import load_encoder
from quipu.actors.tokenizer.template_source import read_template
from quipu.kernels.models.config import read_config
from quipu.kernels.models.families import find_family

SCALARS = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
"""Types of numbers in a file, by their letters for `struct`."""
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": ("I", 2),
    "llama.context_length": ("I", 64),
    "llama.embedding_length": ("I", 8),
    "llama.feed_forward_length": ("I", 16),
    "llama.attention.head_count": ("I", 2),
    "llama.attention.head_count_kv": ("I", 1),
    "llama.attention.layer_norm_rms_epsilon": ("f", 1e-5),
    "llama.rope.freq_base": ("f", 10_000.0),
}
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<|im_end|>", "<0x0A>"]
SHARED = {
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": ("i", [2, 3, 3, 1, 1, 1, 4, 6]),
    "tokenizer.ggml.bos_token_id": ("I", 1),
    "tokenizer.ggml.eos_token_id": ("I", 2),
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
BYTES = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": ["a b"], **SHARED}
PIECES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": ("f", [0.0] * len(TOKENS)), **SHARED}
OTHERS = (
    *("llama.attention.key_length", "llama.attention.value_length", "llama.attention.sliding_window"),
    *("llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *("llama.rope.scaling.original_context_length", "llama.rope.scaling.attn_factor", "llama.expert_count"),
    *("general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p", "general.alignment", "general.type"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.eom_token_id", "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.add_bos_token"),
    *("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "split.count", "split.no"),
)
"""Optional keys that are read if present."""

TEXT = st.one_of(
    st.sampled_from(["", "gpt2", "llama", "qwen2", "tekken", "phi3", "yarn", "linear", "a b", "a b c", "{% if", "\0"]),
    st.sampled_from(["{{ messages", "{% generation %}", "a" * 5000, "</s>", "<|im_end|>", "\ufdd0", "\U0001f600" * 9]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
NUMBER = st.one_of(
    *(st.tuples(st.just(kind), st.sampled_from([0, 1, 2, 7])) for kind in "BHIQ"),
    st.tuples(st.just("i"), st.sampled_from([-(2**31), -1, 0, 3, 2**31 - 1])),
    st.tuples(st.just("Q"), st.sampled_from([2**31, 2**63, 2**64 - 1])),
    st.tuples(st.sampled_from("fd"), st.sampled_from([0.0, -1.0, 0.5, 1e30, float("nan"), float("inf"), 1e-38])),
    st.tuples(st.just("?"), st.booleans()),
)
NUMBERS = st.one_of(
    st.tuples(st.just("i"), st.lists(st.integers(-1, 8), max_size=9)),
    st.tuples(st.just("f"), st.lists(st.floats(width=32), max_size=9)),
    st.tuples(st.just("?"), st.lists(st.booleans(), max_size=9)),
)
VALUE = st.one_of(TEXT, NUMBER, NUMBERS, st.lists(TEXT, max_size=9), st.permutations(TOKENS))


def pack_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(pack_string, value))
    kind, number = value
    if isinstance(number, list):
        return struct.pack(f"<IIQ{len(number)}{kind}", 9, SCALARS[kind], len(number), *number)
    return struct.pack(f"<I{kind}", SCALARS[kind], number)


def pack_file(keys: dict[str, Any], vocab_size: int = len(TOKENS)) -> bytes:
    """Return a file with these keys, and the tensor of the embedding."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, 1, len(keys))]
    parts += (pack_string(name) + pack_value(value) for name, value in keys.items())
    parts.append(pack_string("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, vocab_size, 0, 0))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32 + vocab_size * 8 * 4)


@contextmanager
def made_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the folder of a file within the folder of the test, so that thousands do not remain until the end."""
    made = path.parent / "made"

    def make(prefix: str) -> str:
        made.mkdir()
        return str(made)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    try:
        yield resolve(str(path))
    finally:
        if made.exists():
            for file in made.iterdir():
                file.unlink()
            made.rmdir()


def read_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read everything that serving reads before it loads weights."""
    with made_folder(path, monkeypatch) as folder:
        read_info(folder)
        config = read_config(folder)
        find_family(config).parse(config)
        template = read_template(folder)
        library = load_library(folder)
        load_encoder(library)
        choose_format(folder, library, template and template.text, "auto", "auto")
        InlineRenderer(template)


@st.composite
def drawn_keys(draw: st.DrawFn) -> dict[str, Any]:
    keys = {**LLAMA, **draw(st.sampled_from([BYTES, PIECES]))}
    for name in draw(st.lists(st.sampled_from([*keys, *OTHERS]), min_size=1, max_size=4)):
        keys[name] = draw(VALUE)
    for name in draw(st.lists(st.sampled_from(sorted(keys)), max_size=1)):
        del keys[name]
    return keys


@pytest.mark.parametrize("kind", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_undamaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]) -> None:
    """The files that the drawn ones start from are read completely."""
    (tmp_path / "m.gguf").write_bytes(pack_file({**LLAMA, **kind}))
    read_all(tmp_path / "m.gguf", monkeypatch)


@pytest.mark.timeout(900)  # for thousands of examples
@given(keys=drawn_keys(), data=st.data())
def test_drawn_keys(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], data: st.DataObject) -> None:
    """With values of any type in any key, and with changed bytes, a file is read or refused with a short message."""
    packed = bytearray(pack_file(keys))
    for at in data.draw(st.lists(st.integers(0, len(packed) - 300), max_size=2)):
        packed[at] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "m.gguf").write_bytes(packed)
    with pytest.MonkeyPatch.context() as patch:
        try:
            read_all(folder / "m.gguf", patch)
        except ValueError as error:
            assert 10 < len(str(error)) < 2000


HOSTILE: dict[str, dict[str, Any]] = {
    "runs of one letter": {"tokens": ["a" * size for size in range(1, 4000)]},
    "a long token": {"tokens": ["a", "a" * 4_000_000]},
    "many tokens": {"tokens": [f"{number:x}" for number in range(1 << 16)]},
    "long tokens that begin alike": {"tokens": [*("ab" * 20_000 + "c" * size for size in range(100)), "ab"]},
}


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


@pytest.mark.parametrize("name", HOSTILE)
def test_bounded(tmp_path: Path, name: str) -> None:
    """Vocabularies made to take much time or memory are read or refused within a minute of CPU time and 2 GiB."""
    tokens = HOSTILE[name]["tokens"]
    more = {"tokens": tokens, "token_type": ("i", [1] * len(tokens)), "scores": ("f", [0.0] * len(tokens))}
    keys = {**LLAMA, **PIECES, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}
    (tmp_path / "m.gguf").write_bytes(pack_file(keys, len(tokens)))
    code = (
        "import sys; from quipu.actors.shared.checkpoint import CheckpointError, resolve\n"
        "try: resolve(sys.argv[1])\n"
        "except CheckpointError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.gguf")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ("in too many ways" in ran.stdout) is (name == "runs of one letter"), ran.stdout
