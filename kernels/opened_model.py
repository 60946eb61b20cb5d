"""A checkpoint as backends open it: its configuration is read, its weights are about to be.

What must always hold: whatever of the configuration is not supported is refused before any tensor is read.
"""

from __future__ import annotations

import logging

import attrs
import torch

from .backend import BackendConfig
from .checkpoints.weights import PieceByPiece, Weights, open_weights
from .kv_cache import BlockShape, OtherHeads, choose_kv_dtype
from .kv_cache_size import DraftMemory
from .models.config import DecoderConfig, check_length, read_config
from .models.config_parts import HeadShape
from .models.families import Family, Model, find_family
from .models.headless import Headless
from .models.parts import EMBEDDING, HEAD

SCORE_WEIGHT = "score.weight"
"""The head of a classifier."""
_log = logging.getLogger(__name__)


@attrs.frozen
class OpenedModel:
    """A model without its weights."""

    config: DecoderConfig
    source: PieceByPiece
    dtype: torch.dtype
    """To which all weights are rounded."""
    _family: Family
    _num_positions: int
    _headless: bool = False

    def build(self, weights: Weights) -> Model:
        """Read all weights. Raises ValueError naming a tensor that is missing, wrong or not used."""
        model = self._family.build(self.config, weights, self._num_positions)
        # a tied head may be stored nevertheless
        ignored = {HEAD} if self.config.tie_word_embeddings else set[str]()
        if self._headless:
            ignored |= {SCORE_WEIGHT}
        weights.check_all_used(ignore=frozenset(ignored | self._ignored_layers()))
        return Headless(model) if self._headless else model

    def _ignored_layers(self) -> set[str]:
        """Return the tensors of layers that are not read."""
        first, count = self.config.num_layers, self.config.num_ignored_layers
        prefixes = [f"model.layers.{index}." for index in range(first, first + count)]
        for index in range(self.config.num_cached, first):  # without keys of their own, they may have weights for them
            prefixes += [f"model.layers.{index}.self_attn.{kind}_" for kind in "kv"]
        return self.source.names_within(tuple(prefixes))

    def block_shape(self, block_size: int, kv_dtype: torch.dtype) -> BlockShape:
        config, heads = self.config, self.config.heads_of_layers
        most = HeadShape(config.num_kv_heads, config.head_dim)
        other = next((one for one in heads if one != most), None)
        return BlockShape(
            num_layers=len(heads),
            num_kv_heads=config.num_kv_heads,
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            is_latent=config.latent is not None,
            others=None
            if other is None
            else OtherHeads(
                layers=frozenset(index for index, one in enumerate(heads) if one == other),
                num_kv_heads=other.num_kv_heads,
                head_dim=other.head_dim,
            ),
        )


def draft_memory_of(config: BackendConfig, vocab_size: int, *, held_in: torch.dtype | None = None) -> DraftMemory:
    """Return what the draft model that `config` names, if any, will take; `held_in` is as for `open_weights`.

    Raises ValueError, as `open_model` does, and for another vocabulary than one of `vocab_size` tokens.
    """
    if config.draft_model is None:
        return DraftMemory()
    try:
        drafting = attrs.evolve(
            config,
            model_path=config.draft_model,
            draft_model=None,
            ignored_config_entries=config.ignored_in_draft_model,
        )
        opened = open_model(drafting, held_in=held_in)
        theirs = opened.config.vocab_size
        if theirs != vocab_size:
            raise ValueError(f"its vocabulary has {theirs} tokens, and the model's {vocab_size}")
    except ValueError as error:
        raise ValueError(f"--draft-model {config.draft_model}: {error}") from None
    block = opened.block_shape(config.block_size, choose_kv_dtype(config.kv_cache_dtype, opened.dtype))
    source = opened.source
    num_bytes = source.expected_quantized_bytes if held_in is None else source.expected_bytes
    return DraftMemory(block.num_bytes, num_bytes)


def read_score_weight(config: BackendConfig) -> torch.Tensor:
    """Return the head of a classifier with one label, in float64. Raises ValueError, as `open_model` does."""
    opened = open_model(config, held_in=torch.float32)
    return opened.source.tensor(SCORE_WEIGHT, (1, opened.config.hidden_size))[0].double()


def open_model(config: BackendConfig, *, held_in: torch.dtype | None = None) -> OpenedModel:
    """Open the checkpoint that `config` names; `held_in` is as for `open_weights`.

    Raises ValueError for an unsupported architecture, entry or setting, and for a `max_model_len` beyond the model's
    positions.
    """
    config_json = read_config(config.model_path)
    family = find_family(config_json, headless=config.headless)
    model_config = family.parse(config_json, ignored=config.ignored_config_entries)
    if config.headless:
        model_config = attrs.evolve(model_config, tie_word_embeddings=True)  # so that no head is read
    check_length(model_config, config.max_model_len)
    source, dtype = open_weights(
        config.model_path,
        config_json,
        load_format=config.load_format,
        dtype=config.dtype,
        held_in=held_in,
        quantization=config.quantization,
    )
    if not config.headless and _has_other_head(model_config, source):
        _log.warning("config.json says tie_word_embeddings, but %s differs from the embedding: it is used", HEAD)
        model_config = attrs.evolve(model_config, tie_word_embeddings=False)
    return OpenedModel(model_config, source, dtype, family, config.max_model_len, config.headless)


def _has_other_head(config: DecoderConfig, source: PieceByPiece) -> bool:
    """Return whether a head is stored that is to be the embedding, and is not. Then transformers, too, has both."""
    if not config.tie_word_embeddings or not source.names_within((HEAD,)):
        return False
    return not source.are_equal((EMBEDDING, HEAD), (config.vocab_size, config.hidden_size))
