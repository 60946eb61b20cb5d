"""Entries that are true or false, and are null: what transformers makes of them, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from quipu.kernels.models.config import DecoderConfig
from quipu.kernels.models.families import FAMILIES
from quipu.kernels.models.refusals import COMMON
from tests.kernels.family_configs import CONFIGS
from tests.kernels.models.parsed_configs import config_of, parse


def flags_of(name: str) -> Iterator[tuple[str, bool | None]]:
    """Return the entries that we read and that transformers' class says are true or false, and their defaults."""
    architecture = config_of(name)["architectures"][0]
    read = COMMON | set(FAMILIES[architecture].reads.split())
    for field in fields(type(CONFIGS[name]())):
        if "bool" in str(field.type) and field.name in read:
            yield field.name, field.default


def loads(config_class: type[PreTrainedConfig], name: str, key: str) -> bool:
    """Return whether transformers loads a configuration in which this entry is null."""
    try:
        config_class.from_dict(config_of(name, **{key: None}))
    except StrictDataclassError:
        return False
    return True


def parsed(name: str, key: str, value: bool | None) -> DecoderConfig | str:
    """Return a configuration in which this entry has this value, or why it is refused."""
    try:
        return parse(name, **{key: value})
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", CONFIGS)
def test_null_flags(name: str) -> None:
    """Null is false wherever transformers loads it; where it does not, null is refused unless false is the default."""
    found = list(flags_of(name))
    assert "tie_word_embeddings" in dict(found)
    for key, default in found:
        if default and not loads(type(CONFIGS[name]()), name, key):
            assert parsed(name, key, None) == f"config.json: {key} is null, must be true or false"
        else:
            assert parsed(name, key, None) == parsed(name, key, False), key
