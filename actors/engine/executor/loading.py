"""Loads the backend that the configuration names, and the executor that runs on it."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

import attrs
import numpy as np

from quipu.kernels.backend import Backend, BackendConfig, Capabilities, KVMemory
from quipu.kernels.fake import FakeBackend
from quipu.kernels.kv_cache_size import show
from quipu.kernels.load import load_backend
from quipu.kernels.machine import memory

from ...config.engine_config import EngineConfig
from ...config.pooling_config import Task
from ...shared.tokenizers_library import load_library
from .draft_depth import FREE, PassCosts
from .draft_model import DraftModel
from .drafter import Drafter, Drafts
from .fake_drafter import FakeDrafter
from .grammars import GrammarMasks
from .model_drafts import ModelDrafts
from .pass_costs import measure_costs
from .pooler import Pooler, Vector
from .step_runner import Executor

MAX_DRAFT_ROWS = 64
"""Draft tokens that a step may verify."""
OF_DRAFT_MODEL = "draft_model."
"""What precedes the names of entries of the draft model's configuration."""


def backend_config_of(config: EngineConfig) -> BackendConfig:
    """Return what a backend needs to know of an engine's configuration."""
    ignored = config.ignored_config_entries or ()
    of_draft = [name for name in ignored if config.draft_model is not None and name.startswith(OF_DRAFT_MODEL)]
    return BackendConfig(
        model_path=Path(config.model_path),
        dtype=config.dtype,
        load_format=config.load_format,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs + _num_draft_rows(config),
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_memory=KVMemory(config.kv_cache_bytes, config.memory_utilization),
        may_shorten=config.may_shorten,
        num_sharing=config.num_sharing,
        memory_share=config.memory_share,
        host_tier_bytes=config.kv_host_memory or 0,
        num_staged_blocks=config.num_staged_blocks,
        shares_cache=config.has_peers,
        kv_cache_dtype=config.kv_cache_dtype,
        determinism=config.determinism,
        quantization=config.quantization,
        activations=config.activations,
        enforce_eager=config.enforce_eager,
        tensor_parallel_size=config.tensor_parallel_size,
        trust_remote_code=config.trust_remote_code,
        draft_model=None if config.draft_model is None else Path(config.draft_model),
        headless=config.task == Task.EMBED or config.pooling.is_classifier,
        # one more: while an adapter is replaced, both are loaded
        max_loras=config.max_loras + 1 if config.max_loras else 0,
        max_lora_rank=config.max_lora_rank,
        ignored_config_entries=tuple(name for name in ignored if name not in of_draft),
        ignored_in_draft_model=tuple(name.removeprefix(OF_DRAFT_MODEL) for name in of_draft),
    )


def load_executor(config: EngineConfig) -> Executor:
    """Load the backend that `config` names. Raises ValueError for a checkpoint that it cannot serve."""
    backend = load_backend(config.executor, backend_config_of(config))
    if isinstance(backend, FakeBackend):
        backend.dials.step_seconds = config.fake_step_seconds
        backend.dials.poison_token_id = config.fake_poison_token_id
        backend.dials.only_token_id = config.fake_token_id
        backend.dials.most_tokens = config.fake_most_tokens
        backend.dials.vector_size = config.fake_vector_size
        if config.fake_replies is not None:
            replies = json.loads(Path(config.fake_replies).read_text("utf-8"))
            backend.dials.replies = {int(token_id): tokens for token_id, tokens in replies.items()}
            backend.dials.eos_token_id = config.eos_token_ids[0]
    model = _load_draft_model(config, backend)
    return Executor(
        backend,
        max_num_seqs=config.max_num_seqs,
        masks=_make_masks(config),
        drafter=_make_drafter(config, backend, model),
        others=() if model is None else (model.backend,),
        pooler=Pooler(config.pooling, _read_score_weight(config, backend)),
    )


def _read_score_weight(config: EngineConfig, backend: Backend) -> Vector | None:
    """Return what makes a score of a vector; None: nothing. Raises ValueError for a checkpoint without it."""
    if not config.pooling.is_classifier:
        return None
    if isinstance(backend, FakeBackend):
        return np.ones(backend.dials.vector_size)
    from quipu.kernels.opened_model import read_score_weight  # loads torch, which this backend has done

    return np.asarray(read_score_weight(backend_config_of(config)).numpy())


def _num_draft_rows(config: EngineConfig) -> int:
    """Return how many draft tokens a step may verify, each in a row of its own."""
    return 0 if config.speculative == "off" else min(MAX_DRAFT_ROWS, config.max_num_batched_tokens)


def _load_draft_model(config: EngineConfig, backend: Backend) -> DraftModel | None:
    """Return the draft model, if there is one. Raises ValueError for one that cannot guess for `backend`."""
    whole, plan = backend_config_of(config), backend.memory_plan
    if whole.draft_model is None:
        return None
    if config.speculative == "off":
        raise ValueError("--draft-model: --speculative must not be off")
    try:
        loaded = load_backend(
            backend.capabilities.name,
            attrs.evolve(
                whole,
                model_path=whole.draft_model,
                draft_model=None,
                ignored_config_entries=whole.ignored_in_draft_model,
                ignored_in_draft_model=(),
                num_blocks=plan.num_blocks,
                max_model_len=plan.max_model_len,
                may_shorten=False,
                host_tier_bytes=0,
                num_staged_blocks=0,
                shares_cache=False,
                activations="auto",
                max_loras=0,
            ),
        )
    except ValueError as error:
        raise ValueError(f"--draft-model {whole.draft_model}: {error}") from None
    if config.draft_model_costs is not None:
        costs = PassCosts.of(dict(config.draft_model_costs))
    else:
        costs = measure_costs(loaded, min(config.max_num_seqs, _num_draft_rows(config)), plan.max_model_len)
    return DraftModel(loaded, costs, max_num_tokens=config.max_num_batched_tokens)


def _make_drafter(config: EngineConfig, backend: Backend, model: DraftModel | None) -> Drafts | None:
    """Return what guesses tokens, if anything does. Raises ValueError if the backend cannot verify them."""
    if config.speculative == "off":
        return FakeDrafter(backend) if isinstance(backend, FakeBackend) else None
    if not backend.capabilities.verifies_drafts:
        raise ValueError(f"the {backend.capabilities.name} executor verifies no drafts: --speculative must be off")
    most_rows = min(config.max_num_seqs + _num_draft_rows(config), config.max_num_batched_tokens)
    if config.speculative_costs is not None:
        costs = PassCosts.of(dict(config.speculative_costs), config.speculative_kv_cost / 1000)
    elif isinstance(backend, FakeBackend):
        costs = FREE
    else:
        costs = measure_costs(backend, most_rows, backend.memory_plan.max_model_len)
    return Drafter(
        max_depth=config.num_speculative_tokens,
        max_tokens=_num_draft_rows(config),
        shares_outputs=config.speculative == "suffix",
        costs=costs,
        model=None if model is None else ModelDrafts(model),
    )


def check_host_memory(num_bytes: int) -> None:
    """Raise ValueError if the host has less memory available: the process would be killed once it used it all."""
    host = memory()
    if num_bytes > host.available:
        raise ValueError(
            f"--kv-host-memory {show(num_bytes)} is more than is available, {show(host.available)} of "
            f"{show(host.total)}: lower it"
        )


def numerics_of(capabilities: Capabilities) -> str:
    """Return a digest of everything that determines the bits of a result; equal if engines sample the same tokens.

    The version covers everything that is fixed within one build.
    """
    builds = [f"{package} {_version_of(package)}" for package in ("quipu-llm", "torch")]
    c = capabilities
    if c.library is not None:
        builds.append(c.library)
    formats = (c.dtype, c.weights, c.activations, c.kv_cache_dtype)
    parts = (c.name, c.instruction_set, *formats, c.determinism, *builds)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@cache
def _version_of(package: str) -> str:
    return version(package)


def _make_masks(config: EngineConfig) -> GrammarMasks | None:
    """Return masks made with the same tokenizer as the web process; None if there is no tokenizer."""
    folder = Path(config.model_path)
    if not (folder / "tokenizer.json").is_file():
        return None
    return GrammarMasks(
        load_library(folder).source, config.eos_token_ids, config.max_num_seqs + _num_draft_rows(config)
    )
