"""Makes vLLM's executor with its ranks, the first of them in this process: weights, KV cache, and its model runner.

`vllm_backend.py` calls `load` once. What each rank does is in `rank_loading.py`, how the others are started and watched
in `followers.py`.

What must always hold: there is one block table for all layers; the number of blocks is what `plan_memory` has chosen;
a model that needs more than this is refused by name before it serves; if loading fails, no rank is left.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import torch

from ..backend import BackendConfig, KVMemory, MemoryPlan
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..machine import Memory, memory
from .followers import Followers
from .openmp_threads import end_own_threads
from .rank_loading import RankLoader
from .rank_messages import KVPlan, Profile, RankMemory, Ready
from .stored_tensors import check_stored
from .vllm_settings import ELSEWHERE, check_installed, engine_arguments, refuse_other_inputs, settle_environment
from .weight_progress import num_stored

_log = logging.getLogger(__name__)


@attrs.frozen
class Loaded:
    """A runner that is ready for passes."""

    rank: RankLoader
    """Rank 0, in this process."""
    followers: Followers
    """The other ranks."""
    memory_plan: MemoryPlan
    dtype: str
    quantization: str | None
    library: str
    """vLLM's version, the attention backend, and, where they are so, `V2`, `eager` and the number of ranks."""
    num_threads: int | None
    """Of all ranks, where the CPU computes."""


def load(config: BackendConfig) -> Loaded:
    """Load the model. Raises ValueError for what vLLM, or this backend, does not support."""
    version = check_installed()
    engine_arguments(config)  # what we refuse is refused before anything is started
    refuse_other_inputs(config)
    settle_environment()
    followers = Followers(config)
    try:
        rank = RankLoader(config, followers.leader)
        try:
            return _load(config, rank, followers, version)
        except BaseException:
            followers.close()
            rank.close()
            raise
    except BaseException:
        followers.close()
        raise


def _load(config: BackendConfig, rank: RankLoader, followers: Followers, version: str) -> Loaded:
    if rank.is_on_cpu:
        if config.block_size % 32:
            raise ValueError(
                f"--block-size {config.block_size}: vLLM's attention on CPUs takes multiples of 32: add --block-size 32"
            )
        if config.load_format != "dummy":
            stored = num_stored(config.model_path)
            check_weights_fit(stored, memory(), num_sharing=config.num_sharing, share=config.memory_share)
    _check_supported(rank.vllm_config, config)
    if config.load_format != "dummy":
        check_stored(config.model_path)
    num_threads = torch.get_num_threads()
    held = [rank.load(), *followers.receive_each(RankMemory)]
    plan = _plan(config, rank, followers, held)
    chosen = KVPlan(plan.num_blocks, plan.max_model_len)
    followers.tell(chosen)
    rank.allocate(chosen)
    followers.receive_each(Ready)
    followers.are_loaded()
    if rank.is_on_cpu:
        end_own_threads()
    attention = sorted({group.backend.get_name() for groups in rank.runner.attn_groups for group in groups})
    model, library = rank.vllm_config.model_config, " ".join(["vllm", version, *attention])
    if rank.is_v2:
        library += " V2"
    if config.enforce_eager:
        library += " eager"
    if followers.leader.size > 1:
        library += f" on {followers.leader.size} ranks"
    _log.info("the vllm executor runs %s", library)
    return Loaded(
        rank=rank,
        followers=followers,
        memory_plan=plan,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        library=library,
        num_threads=num_threads if rank.is_on_cpu else None,
    )


def _check_supported(vllm_config: Any, config: BackendConfig) -> None:
    """Raises ValueError for models that need more of the engine than tokens and one block table."""
    model = vllm_config.model_config
    named = ", ".join(model.architectures)
    reasons = {
        "is a pooling model: the vllm executor generates text only": model.runner_type != "generate",
        "has an encoder: the vllm executor serves decoders only": model.is_encoder_decoder,
        "reads more than text, which the vllm executor does not serve": model.is_multimodal_model,
        "keeps a state besides a KV cache: the vllm executor needs one block table for all": (
            model.is_hybrid or model.is_attention_free
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{named} {reason}; {ELSEWHERE}")
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ValueError(f"vLLM computes {named} here only in whole prompts: no chunk, no cached prefix")
    if vllm_config.cache_config.block_size != config.block_size:
        raise ValueError(f"vLLM computes {named} here only with --block-size {vllm_config.cache_config.block_size}")


def _plan(config: BackendConfig, rank: RankLoader, followers: Followers, held: list[RankMemory]) -> MemoryPlan:
    """Choose the number of blocks. Sizes are those of all ranks together."""

    def profile() -> list[int]:
        followers.tell(Profile())
        measured = [rank.profile(), *followers.receive_each(RankMemory)]
        return [one.measured for one in measured]

    block_bytes, weights_bytes = sum(one.block_bytes for one in held), sum(one.weights_bytes for one in held)
    if rank.is_on_cpu:
        return plan_memory(
            config,
            DeviceMemory(
                block_bytes=block_bytes,
                weights_bytes=weights_bytes,
                held=sum(one.held for one in held),
                profile=lambda: sum(profile()),
                memory=memory,
                share=config.memory_share,
                host_tier=config.host_tier_bytes,
                num_staged=config.num_staged_blocks,
            ),
        )
    size = len(held)
    available = size * min(profile())  # each rank has a device of its own, and all have as many blocks
    free, total = torch.cuda.mem_get_info()
    device = DeviceMemory(
        block_bytes=block_bytes,
        weights_bytes=weights_bytes,
        held=0,
        profile=lambda: 0,
        memory=lambda: Memory(size * total, size * free),
    )
    return plan_memory(
        config if config.num_blocks is not None else attrs.evolve(config, kv_memory=KVMemory(available)), device
    )
