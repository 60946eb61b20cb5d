"""Entries of a config.json that are not understood are refused by name, unless the operator names them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedConfig

from quipu.kernels.checkpoints.formats import ENTRIES
from quipu.kernels.load import load_backend
from quipu.kernels.models.families import FAMILIES, find_family
from quipu.kernels.models.known_entries import BESIDE_DECODER, NEUTRAL
from quipu.kernels.models.refusals import COMMON
from quipu.kernels.models.text_part import WITH_TOWERS
from quipu.kernels.opened_model import open_model
from tests.kernels.checkpoints.quantized_files import compressed_config, scheme_of
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.models.test_refusals import config_of, parse

TOWERS = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Llama4ForConditionalGeneration": "llama4",
    "Mistral3ForConditionalGeneration": "mistral",
}


def folder_with(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_towers(architecture: str, inner: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": [architecture], "text_config": config_of(TOWERS[architecture]) | inner, **outer}


@pytest.mark.parametrize("name", CONFIGS)
def test_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    """Name all of them before weights are looked for, whatever their values, and say which flag serves the model."""
    folder_with(tmp_path, config_of(name, new_norm=False, odd_gate={"a": 1}))
    with pytest.raises(ValueError, match=r"not understood: new_norm, odd_gate.*--ignore-config-entries new_norm,odd_g"):
        open_model(backend_config(tmp_path))
    with pytest.raises(ValueError, match=r"not understood: odd_gate.*--ignore-config-entries new_norm,odd_gate "):
        open_model(backend_config(tmp_path, ignored_config_entries=("new_norm",)))


@pytest.mark.parametrize("name", CONFIGS)
def test_ignored_if_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Parse the same configuration as without an entry that the operator names, and say so in a warning."""
    data = config_of(name, new_norm=3)
    with caplog.at_level(logging.WARNING):
        assert find_family(data).parse(data, ignored=["new_norm"]) == parse(name)
    assert "as --ignore-config-entries says: new_norm" in caplog.text


@pytest.mark.parametrize("named", ["old_norm", "absent", "rope_theta", "mlp_bias", "use_cache", "text_config.new_norm"])
def test_flag_names_only_what_is_not_understood(named: str) -> None:
    """Refuse to ignore an entry that is not there, null, read, checked, or known to change nothing."""
    data = config_of("llama", new_norm=3, old_norm=None, mlp_bias=False, use_cache=True, rope_theta=1e4)
    with pytest.raises(ValueError, match=f"--ignore-config-entries: {named} is no entry"):
        find_family(data).parse(data, ignored=["new_norm", named])


def test_null_is_absent() -> None:
    """An entry that is null says nothing, as in transformers, which writes what is not set so."""
    assert parse("llama", new_norm=None) == parse("llama")


def test_refused_entries_are_not_ignored() -> None:
    """An entry that asks for what is not computed is refused although it is named."""
    data = config_of("llama", new_norm=3, mlp_bias=True)
    with pytest.raises(ValueError, match="mlp_bias True is not supported"):
        find_family(data).parse(data, ignored=["new_norm"])


def test_many_are_not_all_named() -> None:
    """A message has an end, however many entries there are."""
    with pytest.raises(ValueError, match="n0099 and 900 more") as refused:
        parse("llama", **{f"n{number:04}": 1 for number in range(1000)})
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("method", ENTRIES)
def test_entries_of_quantization(method: str) -> None:
    """Entries of `quantization_config` are known by its method; of other methods nothing is said here."""
    config = {**dict.fromkeys(ENTRIES[method], 1), "quant_method": method, "block_shape": [2, 2], "unset": None}
    data = config_of("llama", quantization_config=config)
    with pytest.raises(ValueError, match=r"not understood: quantization_config\.block_shape\."):
        find_family(data).parse(data)
    assert find_family(data).parse(data, ignored=["quantization_config.block_shape"]) == parse("llama")
    assert parse("llama", quantization_config=config | {"quant_method": [method]}) == parse("llama")


def test_entries_of_groups() -> None:
    """In groups of compressed-tensors, what is written by that library is known, and nothing else, at any level."""
    config = compressed_config(scheme_of(8, None, symmetric=True, int8_inputs=True), "int-quantized")
    assert parse("llama", quantization_config=config) == parse("llama")
    (group,) = config["config_groups"].values()
    group["rotation"] = "hadamard"
    group["weights"]["zero_scale"] = 2
    group["input_activations"]["clip"] = 6.0
    places = [f"quantization_config.config_groups.group_0.{at}" for at in ("input_activations.clip", "rotation")]
    with pytest.raises(ValueError, match=f"not understood: {', '.join(places)}.*weights.zero_scale"):
        parse("llama", quantization_config=config)


@pytest.mark.parametrize("executor", ["fake", "transformers", "vllm"])
def test_other_executors(tmp_path: Path, executor: str) -> None:
    """The flag is refused where entries are not checked."""
    with pytest.raises(ValueError, match=f"--ignore-config-entries: the {executor} executor does not check"):
        load_backend(executor, backend_config(folder_with(tmp_path, {}), ignored_config_entries=("new_norm",)))


def test_every_tower_is_tested() -> None:
    assert TOWERS.keys() == WITH_TOWERS.keys()
    decoders = {one.architecture for several in WITH_TOWERS.values() for one in several}
    assert decoders == {config_of(name)["architectures"][0] for name in (*TOWERS.values(), "ministral3")}


@pytest.mark.parametrize("architecture", TOWERS)
def test_towers(architecture: str) -> None:
    """Of a model that reads images, too, entries of the whole and of its decoder are told apart."""
    data = of_towers(architecture, {"new_norm": 3}, {"new_norm": 4, "image_token_index": 7, "vision_config": {"a": 1}})
    with pytest.raises(ValueError, match=r"not understood: new_norm, text_config\.new_norm\."):
        find_family(data).parse(data)
    with pytest.raises(ValueError, match=r"not understood: text_config\.new_norm\."):
        find_family(data).parse(data, ignored=["new_norm"])
    assert find_family(data).parse(data, ignored=["new_norm", "text_config.new_norm"]) == parse(TOWERS[architecture])


@pytest.mark.parametrize("architecture", TOWERS)
def test_entries_of_both(architecture: str) -> None:
    """An entry of the whole model may repeat its decoder's, and must not contradict it."""
    inner = config_of(TOWERS[architecture])
    again = of_towers(architecture, {}, {"hidden_size": inner["hidden_size"]})
    assert find_family(again).parse(again) == parse(TOWERS[architecture])
    another = of_towers(architecture, {}, {"hidden_size": 2 * inner["hidden_size"]})
    with pytest.raises(ValueError, match="not understood: hidden_size"):
        find_family(another).parse(another)


def test_base_entries_of_transformers() -> None:
    """What any configuration of transformers may have, and generation defaults that it drops, are known."""
    known = NEUTRAL | COMMON | {"is_encoder_decoder", "per_layer_config"}
    assert PreTrainedConfig().to_dict().keys() <= known
    assert GenerationConfig._get_default_generation_params().keys() <= known  # noqa: SLF001 -- has no other name


def test_no_entry_is_known_twice() -> None:
    """What a family reads is not at the same time said to change nothing."""
    read = COMMON.union(*(family.reads.split() for family in FAMILIES.values()))
    assert not read & NEUTRAL
    assert not (read | NEUTRAL) & BESIDE_DECODER
