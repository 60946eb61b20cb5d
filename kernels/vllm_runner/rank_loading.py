"""Loads one rank: its worker with its part of the weights, and its part of the KV cache.

Rank 0 does so in the engine's process (`vllm_loading.py`), the others in theirs (`rank_process.py`). The order of the
calls is that of vLLM's own engine core (`vllm/v1/engine/core.py`, 0.32), without its scheduler and its KV manager.

What must always hold: all ranks make these calls in the same order, because some of them wait for the other ranks; the
number of blocks is what rank 0 has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from safetensors import SafetensorError

from ..backend import BackendConfig
from ..machine import peak_of, resident
from ..step_errors import is_out_of_memory
from .kv_blocks import KVBlocks
from .latent_attention import expand_latents, rotate_in_torch
from .rank_executor import executor_class
from .rank_messages import KVPlan, RankMemory, RankPlace
from .vllm_settings import ELSEWHERE, choose_runner, engine_arguments
from .weight_progress import shown_progress

_LEAST_SHARE = 0.01
"""Of a device: what vLLM demands to be free if the size of the KV cache is given."""
_MEASURED_LATER = 1 << 30
"""Bytes of KV cache that a worker on the CPU is told of while it loads: it must be told some."""


class RankLoader:
    """One rank between the start of its process and its first pass. Methods are called once, in this order."""

    executor: Any = None
    runner: Any = None
    blocks: Any = None
    """`KVBlocks`, once the cache is allocated."""

    def __init__(self, config: BackendConfig, place: RankPlace) -> None:
        """Decide on vLLM's configuration. Raises ValueError for what vLLM refuses. Nothing is loaded yet."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        self._place = place
        self._quantization = config.quantization
        self._weights = config.model_path if place.leads and config.load_format != "dummy" else None
        self.is_on_cpu = bool(current_platform.is_cpu())
        choose_runner(is_on_cpu=self.is_on_cpu)
        if self.is_on_cpu:
            expand_latents(config.dtype)
        arguments = engine_arguments(config) | self._memory_arguments(config)
        arguments["distributed_executor_backend"] = executor_class(place)
        try:
            self.vllm_config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        except (ValueError, NotImplementedError) as error:  # vLLM raises either for settings that it does not support
            raise ValueError(f"vLLM refuses this model or its settings: {error}") from error
        if self.is_on_cpu:
            rotate_in_torch(self.vllm_config.model_config)
        register_all_kvcache_specs(self.vllm_config)

    @property
    def is_v2(self) -> bool:
        """Whether vLLM's newer runner computes."""
        return bool(self.vllm_config.use_v2_model_runner)

    def load(self) -> RankMemory:
        """Make the worker, which reads its weights, and return what it holds. All ranks take part.

        Raises ValueError for weights that vLLM does not read, or cannot quantize here, and if compiling fails.
        """
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.executor.abstract import Executor

        set_num_threads = torch.set_num_threads
        if self.is_on_cpu and self._place.size > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._place.size))
        progress = shown_progress(self._weights) if self._weights is not None else nullcontext()
        with progress, _counted_weights() as unpacked:
            with self._refusing():
                self.executor = Executor.get_class(self.vllm_config)(self.vllm_config)
        # its worker replaced it, for all of this process
        setattr(torch, "set_num_threads", set_num_threads)  # noqa: B010 - mypy refuses an assignment to a function
        self.runner = self.executor.driver_worker.worker.model_runner
        self._specs = self.executor.get_kv_cache_specs()
        every_spec = [spec for worker in self._specs for spec in worker.values()]
        layouts = self.executor.get_supported_kv_cache_layouts()
        self._layout = resolve_kv_cache_layout(self.vllm_config, layouts, every_spec).name
        self.executor.set_kv_cache_layout(self._layout)
        if self.is_on_cpu and not self.vllm_config.model_config.enforce_eager:
            _compile(self.runner)
        self._memory = RankMemory(
            block_bytes=sum(spec.page_size_bytes for spec in every_spec),
            weights_bytes=max(_num_bytes(self.runner.model), *unpacked),
            held=resident(),
        )
        return self._memory

    def profile(self) -> RankMemory:
        """Run the largest pass, and return what it took, or what it leaves. All ranks take part."""
        if self.is_on_cpu:
            return attrs.evolve(self._memory, measured=peak_of(self.runner.profile_run))
        (available,) = self.executor.determine_available_memory()
        return attrs.evolve(self._memory, measured=available)

    def allocate(self, plan: KVPlan) -> None:
        """Allocate the cache. All ranks take part. Raises ValueError if it cannot have one block table for all."""
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        self.vllm_config.cache_config.num_gpu_blocks_override = plan.num_blocks
        # it refuses a cache that cannot hold a sequence of the maximum length, which the plan may have shortened
        self.vllm_config.model_config.max_model_len = plan.max_model_len
        block_bytes = self._memory.block_bytes
        try:
            kv_configs = get_kv_cache_configs(self.vllm_config, self._specs, [plan.num_blocks * block_bytes])
        except (ValueError, NotImplementedError) as error:  # the second for layers whose blocks differ in size
            raise ValueError(f"vLLM cannot lay out this model's KV cache: {error}") from error
        (kv_config,) = kv_configs
        if len(kv_config.kv_cache_groups) != 1:
            raise ValueError(
                f"this model needs {len(kv_config.kv_cache_groups)} block tables for each sequence, and the vllm "
                f"executor has one; {ELSEWHERE}"
            )
        if kv_config.num_blocks != plan.num_blocks:
            raise ValueError(f"vLLM allocates {kv_config.num_blocks} KV blocks instead of {plan.num_blocks}")
        kv_config.kv_cache_layout = self._layout
        self.executor.initialize_from_config(kv_configs)
        self.executor.compile_or_warm_up_model()
        self.blocks = KVBlocks(self.runner.kv_caches, plan.num_blocks, self._place.rank, self._place.size)
        if self.blocks.own_bytes != block_bytes:
            raise ValueError(f"vLLM's KV blocks have {self.blocks.own_bytes} bytes instead of {block_bytes}")

    def close(self) -> None:
        """Free what was loaded so far, and leave the group of ranks. Threads of libraries stay with the process."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        if self.executor is not None:
            self.executor.shutdown()
            self.executor = self.runner = self.blocks = None
        if self.is_on_cpu or self._place.size == 1:  # NCCL might wait for ranks that have ended
            destroy_model_parallel()
            destroy_distributed_environment()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what vLLM raises at a broken checkpoint, or without a kernel for `--quantization`, into a refusal."""
        # shapes that do not fit, tensors of unknown names, formats without a reader, files that are cut short
        broken = (AssertionError, KeyError, NotImplementedError, SafetensorError)
        try:
            yield
        except (ValueError, RuntimeError, *broken) as error:
            if is_out_of_memory(error):
                raise
            if self._quantization is not None:
                raise ValueError(f"--quantization {self._quantization}: vLLM cannot load this here: {error}") from error
            if isinstance(error, broken):
                raise ValueError(f"vLLM cannot load its weights: {error}") from error
            raise

    def _memory_arguments(self, config: BackendConfig) -> dict[str, Any]:
        if self.is_on_cpu:
            return {"kv_cache_memory_bytes": _MEASURED_LATER}
        if config.kv_memory.num_bytes is not None:
            # its default share of the device would have to be free, although it does not take it
            size = config.kv_memory.num_bytes // self._place.size
            return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": _LEAST_SHARE}
        if config.kv_memory.utilization is not None:
            return {"gpu_memory_utilization": config.kv_memory.utilization / config.num_sharing}
        return {}


@contextmanager
def _counted_weights() -> Iterator[list[int]]:
    """Yield a list of what a model's weights take before they are packed: on CPUs, they are no parameters then."""
    from vllm.model_executor.model_loader import base_loader

    counted, pack = [0], base_loader.process_weights_after_loading

    def count_first(model: torch.nn.Module, *args: Any) -> None:
        counted.append(_num_bytes(model))
        pack(model, *args)

    base_loader.process_weights_after_loading = count_first
    try:
        yield counted
    finally:
        base_loader.process_weights_after_loading = pack


def _num_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _compile(runner: Any) -> None:
    """Compile the model. Raises ValueError if that fails: without a C++ compiler, for one."""
    try:
        runner.warming_up_model()
    except RuntimeError as error:  # torch's compiler raises no other
        raise ValueError(
            f"vLLM could not compile the model; --enforce-eager runs it without ({type(error).__name__}: {error})"
        ) from error
