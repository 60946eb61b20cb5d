"""Makes vLLM's executor with one worker in this process: weights, KV cache, and its model runner.

`vllm_backend.py` calls `load` once. The order of the calls is that of vLLM's own engine core (`vllm/v1/engine/core.py`,
0.32), without its scheduler and its KV manager.

What must always hold: there is one block table for all layers; the number of blocks is what `plan_memory` has chosen;
a model that needs more than this is refused by name before it serves.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import torch

from ..backend import BackendConfig, KVMemory, MemoryPlan
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..machine import Memory, memory, peak_of, resident
from .kv_blocks import KVBlocks
from .latent_attention import expand_latents, rotate_in_torch
from .vllm_settings import check_installed, engine_arguments, settle_environment

_MEASURED_LATER = 1 << 30
"""Bytes of KV cache that a worker on the CPU is told of while it loads: it must be told some."""

_log = logging.getLogger(__name__)


@attrs.frozen
class Loaded:
    """A runner that is ready for passes."""

    executor: Any
    runner: Any
    blocks: KVBlocks
    memory_plan: MemoryPlan
    dtype: str
    quantization: str | None
    library: str
    """vLLM's version and the attention backend."""
    is_on_cpu: bool


def load(config: BackendConfig) -> Loaded:
    """Load the model. Raises ValueError for what vLLM, or this backend, does not support."""
    version = check_installed()
    arguments = engine_arguments(config)
    settle_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.executor.abstract import Executor

    is_on_cpu = bool(current_platform.is_cpu())
    if is_on_cpu:
        if config.block_size % 32:
            raise ValueError(
                f"--block-size {config.block_size}: vLLM's attention on CPUs takes multiples of 32: add --block-size 32"
            )
        arguments["kv_cache_memory_bytes"] = _MEASURED_LATER
        expand_latents()
        if config.load_format != "dummy":
            stored = sum(file.stat().st_size for file in config.model_path.glob("*.safetensors"))
            check_weights_fit(stored, memory(), num_sharing=config.num_sharing, share=config.memory_share)
    elif config.kv_memory.num_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_memory.num_bytes
    elif config.kv_memory.utilization is not None:
        arguments["gpu_memory_utilization"] = config.kv_memory.utilization / config.num_sharing
    try:
        vllm_config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, NotImplementedError) as error:  # vLLM raises either for settings that it does not support
        raise ValueError(f"vLLM refuses this model or its settings: {error}") from error
    _check_supported(vllm_config, config)
    if is_on_cpu:
        rotate_in_torch(vllm_config.model_config)
    register_all_kvcache_specs(vllm_config)
    set_num_threads = torch.set_num_threads
    executor = Executor.get_class(vllm_config)(vllm_config)
    setattr(torch, "set_num_threads", set_num_threads)  # noqa: B010 - its worker replaced it, for all of this process
    runner = executor.driver_worker.worker.model_runner
    plan = _allocate(executor, vllm_config, config, runner, is_on_cpu=is_on_cpu)
    blocks = KVBlocks(runner.kv_caches, plan.num_blocks)
    if blocks.num_bytes != plan.block_bytes:
        raise ValueError(f"vLLM's KV blocks have {blocks.num_bytes} bytes instead of {plan.block_bytes}")
    attention = sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups})
    model, library = vllm_config.model_config, f"vllm {version} {' '.join(attention)}"
    _log.info("the vllm executor runs %s", library)
    return Loaded(
        executor=executor,
        runner=runner,
        blocks=blocks,
        memory_plan=plan,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        library=library,
        is_on_cpu=is_on_cpu,
    )


def _check_supported(vllm_config: Any, config: BackendConfig) -> None:
    """Raises ValueError for models that need more of the engine than tokens and one block table."""
    model = vllm_config.model_config
    named = ", ".join(model.architectures)
    if model.runner_type != "generate":
        raise ValueError(f"{named} is a pooling model: the vllm executor generates text only")
    if model.is_encoder_decoder:
        raise ValueError(f"{named} has an encoder: the vllm executor serves decoders only")
    if model.is_multimodal_model:
        raise ValueError(f"{named} reads more than text, which the vllm executor does not serve")
    if model.is_hybrid or model.is_attention_free:
        raise ValueError(f"{named} keeps a state besides a KV cache: the vllm executor needs one block table for all")
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ValueError(f"vLLM computes {named} here only in whole prompts: no chunk, no cached prefix")
    if vllm_config.cache_config.block_size != config.block_size:
        raise ValueError(f"vLLM computes {named} here only with --block-size {vllm_config.cache_config.block_size}")


def _compile(runner: Any) -> None:
    """Compile the model, unless it runs eagerly. Raises ValueError if that fails: without a C++ compiler, for one."""
    try:
        runner.warming_up_model()
    except RuntimeError as error:  # torch's compiler raises no other
        raise ValueError(
            f"vLLM could not compile the model; --enforce-eager runs it without ({type(error).__name__}: {error})"
        ) from error


def _allocate(executor: Any, vllm_config: Any, config: BackendConfig, runner: Any, *, is_on_cpu: bool) -> MemoryPlan:
    """Choose the number of blocks and allocate the KV cache."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    specs = executor.get_kv_cache_specs()
    every_spec = [spec for worker in specs for spec in worker.values()]
    layout = resolve_kv_cache_layout(vllm_config, executor.get_supported_kv_cache_layouts(), every_spec)
    executor.set_kv_cache_layout(layout.name)
    block_bytes = sum(spec.page_size_bytes for spec in every_spec)
    weights_bytes = sum(parameter.nbytes for parameter in runner.model.parameters())
    if is_on_cpu:
        _compile(runner)
        sized, device = (
            config,
            DeviceMemory(
                block_bytes=block_bytes,
                weights_bytes=weights_bytes,
                held=resident(),
                profile=lambda: peak_of(runner.profile_run),
                memory=memory,
                share=config.memory_share,
                host_tier=config.host_tier_bytes,
            ),
        )
    else:
        (available,) = executor.determine_available_memory()
        sized = config if config.num_blocks is not None else attrs.evolve(config, kv_memory=KVMemory(available))
        device = DeviceMemory(
            block_bytes=block_bytes,
            weights_bytes=weights_bytes,
            held=0,
            profile=lambda: 0,
            memory=lambda: Memory(torch.cuda.mem_get_info()[1], torch.cuda.mem_get_info()[0]),
        )
    plan = plan_memory(sized, device)
    vllm_config.cache_config.num_gpu_blocks_override = plan.num_blocks
    # it refuses a cache that cannot hold a sequence of the maximum length, which the plan may have shortened
    vllm_config.model_config.max_model_len = plan.max_model_len
    try:
        kv_configs = get_kv_cache_configs(vllm_config, specs, [plan.num_blocks * block_bytes])
    except (ValueError, NotImplementedError) as error:  # it raises the second for layers whose blocks differ in size
        raise ValueError(f"vLLM cannot lay out this model's KV cache: {error}") from error
    (kv_config,) = kv_configs
    if len(kv_config.kv_cache_groups) != 1:
        raise ValueError(
            f"this model needs {len(kv_config.kv_cache_groups)} block tables for each sequence, and the vllm executor "
            f"has one"
        )
    if kv_config.num_blocks != plan.num_blocks:
        raise ValueError(f"vLLM allocates {kv_config.num_blocks} KV blocks instead of {plan.num_blocks}")
    kv_config.kv_cache_layout = layout.name
    executor.initialize_from_config(kv_configs)
    executor.compile_or_warm_up_model()
    return plan
