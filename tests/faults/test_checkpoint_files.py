"""Whatever a checkpoint's JSON files contain, the server starts or refuses them by name; nothing else is raised.

In the engine process a refusal must be a ValueError or an OSError (`actors/engine/engine_server.py`). Anything else
would count as a crash, and the engine would be started five times.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.shared.checkpoint import CheckpointError
from quipu.kernels.checkpoints.files import find_tensors
from quipu.kernels.models.config import check_length, read_config
from quipu.kernels.models.families import FAMILIES, find_family
from quipu.web.cli.cli import make_parser
from quipu.web.cli.settings import resolve_config
from tests.kernels.family_configs import CONFIGS
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -1e308, 1e-320, 0.0, -0.0, 0.5]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(
        ["", "yarn", "llama3", "linear", "longrope", "full_attention", "bfloat16", "\ud800", "\x00", "9" * 99]
    ),
    st.text(max_size=5),
    st.lists(st.none() | st.integers(-1, 5) | st.text(max_size=3) | st.just([]) | st.just({}), max_size=4),
    st.dictionaries(
        st.sampled_from(["content", "rope_type", "factor", "name", "x"]), st.none() | st.integers() | st.just([])
    ),
)
ROPE_ENTRIES = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "attention_factor",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
    "full_attention",
    "sliding_attention",
]
ROPE = st.dictionaries(
    st.sampled_from(ROPE_ENTRIES),
    JUNK | st.sampled_from([1.0, 2, 4096, 8192, "yarn", "longrope", "llama3", [1.0] * 4]),
    max_size=8,
)
TENSOR = st.fixed_dictionaries({"dtype": JUNK, "shape": JUNK, "data_offsets": JUNK})
DEEP: dict[str, Callable[[int], str]] = {
    "lists": lambda depth: "[" * depth + "]" * depth,
    "objects": lambda depth: '{"a":' * depth + "1" + "}" * depth,
    "cut off": lambda depth: "[" * depth,
}
DEPTHS = (90, 300, 950, 5_000, 200_000)


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = CONFIGS[name]().to_dict()
    named = config["model_type"].removesuffix("_text").replace("_", "") + "for"
    config["architectures"] = [next(key for key in FAMILIES if key.lower().startswith(named))]
    return config


ALL = {name: config_of(name) for name in CONFIGS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(TINY, tmp_path_factory.mktemp("checkpoints") / "model"))


def read_on_the_web_side(folder: Path) -> None:
    """Read what `quipu serve` reads before it starts anything. Refusals are CheckpointErrors that name an entry."""
    arguments = make_parser().parse_args(["serve", str(folder)])
    try:
        resolve_config(arguments)
    except CheckpointError as error:
        assert_clear(error)


def read_in_the_engine(folder: Path) -> None:
    try:
        data = read_config(folder)
        check_length(find_family(data).parse(data), 16)
    except ValueError as error:
        assert_clear(error)


def assert_clear(error: Exception) -> None:
    """Assert that an error names the place and is not too long."""
    assert len(str(error)) < 2000
    assert any(name in str(error) for name in (".json", "rope", "dtype", "architecture", "max_position_embeddings"))


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """Generate a valid config of some family with a few invalid entries."""
    config = dict(ALL[draw(st.sampled_from(sorted(ALL)))])
    for name in draw(
        st.lists(st.sampled_from([*sorted(config), "rope_scaling", "rope_theta"]), min_size=1, max_size=3)
    ):
        config[name] = draw(JUNK)
    if draw(st.booleans()):
        config[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(ROPE)
    return config


@given(config=changed())
def test_config(folder: Path, config: dict[str, Any]) -> None:
    """Configs of every family with entries of any type, alone or together, are read or refused by name."""
    (folder / "config.json").write_text(json.dumps(config))
    read_on_the_web_side(folder)
    read_in_the_engine(folder)


@given(name=st.sampled_from(sorted(ALL)), data=st.data())
def test_refused_by_the_name_of_the_entry(folder: Path, name: str, data: st.DataObject) -> None:
    """A size that is a string, a list or a 400-digit number is refused by name, in both processes."""
    entry = data.draw(st.sampled_from(["vocab_size", "max_position_embeddings"]))
    value = data.draw(
        st.sampled_from(["12", [12], {"a": 12}, 10**400, float("nan"), float("inf"), 12.5, True, None, 0])
    )
    (folder / "config.json").write_text(json.dumps(ALL[name] | {entry: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{entry}"):
        resolve_config(make_parser().parse_args(["serve", str(folder)]))
    with pytest.raises(ValueError, match=rf"config\.json.*{entry}"):
        content = read_config(folder)
        find_family(content).parse(content)


@given(eos=JUNK)
def test_generation_config(folder: Path, eos: Any) -> None:
    """End tokens are ids or are refused by name."""
    shutil.copy(TINY / "config.json", folder)
    path = folder / "generation_config.json"
    try:
        path.write_text(json.dumps({"eos_token_id": eos}))
        read_on_the_web_side(folder)
    finally:
        path.unlink()


@given(
    config=st.dictionaries(
        st.sampled_from(["chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "x"]),
        JUNK | st.lists(st.fixed_dictionaries({"name": st.just("default"), "template": JUNK}), max_size=2),
    )
)
def test_tokenizer_config(folder: Path, config: dict[str, Any]) -> None:
    """A template and its tokens are strings or are refused by name."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    try:
        vocabulary = Vocabulary(folder)
    except CheckpointError as error:
        assert "tokenizer_config.json: " in str(error)
    else:
        template = vocabulary.template
        assert template is None or all(
            isinstance(text, str) for text in (template.source, *template.variables.values())
        )
    finally:
        shutil.copy(TINY / "tokenizer_config.json", folder)


@given(index=JUNK | st.fixed_dictionaries({"weight_map": JUNK | st.dictionaries(st.text(max_size=3), JUNK)}))
def test_index(tmp_path_factory: pytest.TempPathFactory, index: Any) -> None:
    """Any index is refused if none of its files exists."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, OSError)):
        find_tensors(folder)


@given(header=JUNK | st.dictionaries(st.text(max_size=3), TENSOR))
def test_header(tmp_path_factory: pytest.TempPathFactory, header: Any) -> None:
    """Whatever a weights file's header contains, it is refused with a ValueError or an OSError."""
    folder = tmp_path_factory.mktemp("header")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises((ValueError, OSError)):
        find_tensors(folder)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", DEEP)
def test_any_depth(tmp_path: Path, kind: str, depth: int) -> None:
    """Excessive nesting is refused in every file, both as the whole file and as the value of an entry."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        for text in (DEEP[kind](depth), '{"dtype": %b, "chat_template": %b}'.replace("%b", DEEP[kind](depth))):
            folder = Path(shutil.copytree(TINY, tmp_path / "model"))
            (folder / name).write_text(text)
            read_on_the_web_side(folder)
            read_in_the_engine(folder)
            with suppress(CheckpointError):
                Vocabulary(folder)
            shutil.rmtree(folder)
    (tmp_path / "model.safetensors.index.json").write_text(DEEP[kind](depth))
    with pytest.raises(ValueError, match="not a valid index"):
        find_tensors(tmp_path)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and a folder in place of a file, are refused by name."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        for spoil in (lambda path: path.write_bytes(b'{"a": "\xff"}'), Path.mkdir):
            folder = Path(shutil.copytree(TINY, tmp_path / "model"))
            (folder / name).unlink(missing_ok=True)
            spoil(folder / name)
            with pytest.raises(CheckpointError, match=name):
                resolve_config(make_parser().parse_args(["serve", str(folder)]))
                Vocabulary(folder)
            shutil.rmtree(folder)


@pytest.mark.parametrize("token_id", [2**24, 2**31, 2**32 - 1])
def test_vocabulary_with_a_huge_id(tmp_path: Path, token_id: int) -> None:
    """A single id far beyond all others uses no memory for the ids between."""
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["model"]["vocab"]["far away"] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocabulary(folder)
