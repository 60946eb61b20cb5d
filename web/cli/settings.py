"""Resolve flags and checkpoint into every size of the server, and into what `/server_info` shows.

Used by `serve.py`. What must always hold: all that the engine is started with is shown.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.config.declarations import settings_of
from quipu.actors.config.engine_config import DEFAULT_BLOCK_SIZE, VLLM_BLOCK_SIZE, EngineConfig, KvEventsConfig
from quipu.actors.config.engine_roles import EngineRole, why_no_roles
from quipu.actors.config.pooling_config import Task
from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.config.tier_settings import TIER_FLAGS
from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.fleet.cluster.ray_nodes import check_ray
from quipu.actors.fleet.processes.link_tls import tls_of
from quipu.actors.request_desk.interface import ServingInfo, VectorInfo
from quipu.actors.shared.checkpoint import CheckpointError, CheckpointInfo, read_info, resolve
from quipu.actors.shared.pooling_files import read_vector_files

from .generation_config import read_sampling_defaults
from .lora_flags import refuse_without_engines, resolve_adapters
from .setting_flags import EngineCounts
from .speculative_flags import resolve_speculation

log = structlog.get_logger("quipu.cli")

WAITING_PER_RUNNING = 4
"""Sequences that may wait, by default, for each that may run."""
MIN_WAITING = 1024
"""However few may run: so that what engines hold of the largest request (`RuntimeConfig.submit_window`) fits into one
tenant's half."""
TOKENS_PER_WAITING = 2048
"""Prompt tokens that may wait, by default, for each sequence that may wait."""
MIN_WAITING_PROMPTS = 8
"""The default always has room for this many prompts of maximum length."""
TENANT_SHARE = 0.5
"""Share of what may wait that one tenant may have, where there are several."""


def resolve_config(
    arguments: argparse.Namespace, upstreams: tuple[UpstreamConfig, ...] = ()
) -> tuple[RuntimeConfig, ServingInfo]:
    """Return every size of the server, and what clients are told of it. Raises CheckpointError."""
    engines = _resolve_engines(arguments, 0 if upstreams else 1)
    _check_tiers(arguments, engines["num_engines"])
    if engines["num_engines"] == 0:
        if not upstreams:
            raise CheckpointError("--engines 0 needs an --upstream")
        refuse_without_engines(arguments)
        block_size = _resolve_block_size(arguments)
        engine = EngineConfig(model_path="", max_model_len=0, eos_token_ids=(), block_size=block_size)
        config = RuntimeConfig(
            engine=engine,
            model_names=tuple(dict.fromkeys(arguments.served_model_name or ())),
            vocab_size=0,
            kv_dtype="",
            upstreams=upstreams,
            **_given(arguments, RuntimeConfig) | engines,
        )
        return config, _serving_info(arguments, config, {})
    path = resolve(arguments.model)
    checkpoint = read_info(
        path, name=_model_name(arguments.model), dtype=arguments.dtype, quantization=arguments.quantization
    )
    model_names = tuple(dict.fromkeys(arguments.served_model_name or [checkpoint.name]))
    adapters = resolve_adapters(arguments, model_names)
    vectors = read_vector_files(path, arguments.task or "auto")
    _check_task(arguments, vectors.task)
    sampling_defaults = read_sampling_defaults(arguments.generation_config, path, checkpoint.vocab_size)
    block_size = _resolve_block_size(arguments)
    max_model_len, num_blocks = _resolve_sizes(arguments, checkpoint, block_size)
    kv_cache_dtype = checkpoint.dtype if arguments.kv_cache_dtype == "auto" else arguments.kv_cache_dtype
    resolved = {
        "dtype": checkpoint.dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": num_blocks,
        **_resolve_scheduling(arguments, max_model_len),
        "max_loras": adapters["max_loras"],
        "max_lora_rank": adapters["max_lora_rank"],
        "task": vectors.task.value,
        **resolve_speculation(
            arguments, vectors.task, checkpoint, max_model_len, on_cluster=engines.get("cluster") is not None
        ),
    }
    engine = EngineConfig(
        model_path=str(path),
        eos_token_ids=checkpoint.eos_token_ids,
        may_shorten=arguments.max_model_len is None,
        has_peers=_have_peers(arguments, engines),
        pooling=vectors.pooling,
        # only a key file knows several tenants
        max_waiting_share=1.0 if arguments.key_file is None else TENANT_SHARE,
        **_given(arguments, EngineConfig) | resolved,
    )
    config = RuntimeConfig(
        engine=engine,
        model_names=model_names,
        lora_modules=adapters["lora_modules"],
        vocab_size=checkpoint.vocab_size,
        kv_dtype=kv_cache_dtype,
        upstreams=upstreams,
        **_given(arguments, RuntimeConfig) | engines,
    )
    info = _serving_info(arguments, config, sampling_defaults)
    told = VectorInfo(vectors.num_dimensions, vectors.dimensions, vectors.default_prompt, vectors.has_pair_template)
    return config, attrs.evolve(info, task=vectors.task, vectors=told)


def _check_task(arguments: argparse.Namespace, task: Task) -> None:
    """Raises CheckpointError for what only a server that generates can have."""
    if task is Task.GENERATE:
        return
    if arguments.executor in ("vllm", "transformers"):
        raise CheckpointError(
            f"--task {task}: the {arguments.executor} executor makes no embeddings and no scores, only text"
        )


def _serving_info(
    arguments: argparse.Namespace, config: RuntimeConfig, sampling_defaults: dict[str, float]
) -> ServingInfo:
    engine, has_engines, shown = config.engine, config.num_engines > 0, _shown(config)
    if has_engines:
        settings: dict[str, object] = {
            "model": arguments.model,
            "generation_config": arguments.generation_config,
            "sampling_defaults": sampling_defaults,
            **_shown(engine),
            **shown,
            **({"engine_roles": config.engine_roles} if config.engine_roles else {}),
            **({} if config.cluster is None else _shown(config.cluster)),
            "lora_modules": config.lora_modules,
            "lora_dir": arguments.lora_dir,
            "max_waiting_share": engine.max_waiting_share,
            "allow_client_priority": arguments.allow_client_priority,
        }
    else:
        settings = {name: shown[name] for name in ("engines", "routing", "affinity_tokens")}
    for name in ("request_timeout", "max_body_bytes", "max_body_memory", "data_dir"):
        settings[name] = vars(arguments)[name]
    return ServingInfo(
        model_names=config.model_names,
        created=int(time.time()),
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        vocab_size=config.vocab_size,
        sampling_defaults=sampling_defaults,
        has_engines=has_engines,
        settings=settings | {"upstreams": [upstream.shown() for upstream in config.upstreams]},
    )


def _given(arguments: argparse.Namespace, config: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """Return the settings of a config as the flags say them, None where they are still to be resolved."""
    return {setting.attribute: getattr(arguments, setting.destination) for setting in settings_of(config)}


def _shown(config: attrs.AttrsInstance) -> dict[str, object]:
    """Return the settings of a config as `/server_info` shows them."""
    values = attrs.asdict(config, recurse=False)
    return {
        setting.key: value.endpoint if isinstance(value := values[setting.attribute], KvEventsConfig) else value
        for setting in settings_of(type(config))
        if setting.is_shown
    }


def _resolve_engines(arguments: argparse.Namespace, default: int) -> dict[str, Any]:
    """Return how many engines there are and may be, and the cluster that they run on. Raises CheckpointError."""
    engines = EngineCounts(default) if arguments.engines is None else arguments.engines
    count = engines.count
    fewest, most = arguments.min_engines or count, arguments.max_engines or count
    if fewest > count:
        raise CheckpointError(f"--engines {count} is less than --min-engines {fewest}")
    if most < count:
        raise CheckpointError(f"--engines {count} is more than --max-engines {most}")
    found: dict[str, Any] = {"num_engines": count, "min_engines": fewest, "max_engines": most}
    if engines.roles:
        _check_roles(engines.roles, resumes=arguments.on_engine_death == "resume", autoscales=fewest < most)
        if not arguments.enable_prefix_caching:
            raise CheckpointError("--engines with roles needs --enable-prefix-caching")
        found["engine_roles"] = engines.roles
    if engines.on_ray:
        check_ray()
        cluster = found["cluster"] = ClusterConfig(model=arguments.model, **_given(arguments, ClusterConfig))
        if (tls := tls_of(cluster)) is not None:
            tls.check()
    return found


def _have_peers(arguments: argparse.Namespace, engines: dict[str, Any]) -> bool:
    """Return whether engines fetch blocks from each other: several, of one rank each."""
    have_peers = (
        engines["max_engines"] > 1 and arguments.tensor_parallel_size == 1 and bool(arguments.enable_prefix_caching)
    )
    if "engine_roles" in engines and not have_peers:
        log.warning("config.roles_without_peers", detail="these engines compute again what others have computed")
    return have_peers


def _check_roles(roles: Sequence[EngineRole], *, resumes: bool, autoscales: bool) -> None:
    """Raises CheckpointError if engines with these roles could not serve together, or none may have a role."""
    if not any(role.may_decode for role in roles):
        raise CheckpointError("--engines has only engines for prefill: add some for decode, or mixed ones")
    if not any(role.may_prefill for role in roles):
        raise CheckpointError("--engines has only engines for decode: add some for prefill, or mixed ones")
    if (reason := why_no_roles(resumes=resumes, autoscales=autoscales)) is not None:
        raise CheckpointError(reason)


def _check_tiers(arguments: argparse.Namespace, num_engines: int) -> None:
    """Raises CheckpointError if there is no prefix cache that could have lower tiers, or one is incomplete."""
    flags = TIER_FLAGS
    given = {name: flag for name, flag in flags.items() if getattr(arguments, name) is not None}
    for name in ("kv_host_memory", "kv_disk", "kv_remote"):
        if name not in given:
            continue
        if num_engines == 0:
            raise CheckpointError(f"{flags[name]} is for engines, and with --upstream alone there are none")
        if not arguments.enable_prefix_caching:
            raise CheckpointError(f"{flags[name]} needs --enable-prefix-caching")
    if "kv_disk" in given and "kv_disk_size" not in given:
        raise CheckpointError(f"{flags['kv_disk']} needs {flags['kv_disk_size']}, for example 100GiB")
    for name in given:
        for tier in ("kv_disk", "kv_remote"):
            if name.startswith(f"{tier}_") and tier not in given:
                raise CheckpointError(f"{flags[name]} needs {flags[tier]}")


def _resolve_scheduling(arguments: argparse.Namespace, max_model_len: int) -> dict[str, int]:
    """Return how many sequences may run, and how much may wait. A limit of 0 means no limit."""
    num_running = min(arguments.max_num_seqs, arguments.max_num_batched_tokens)
    requests, tokens = arguments.max_waiting_requests, arguments.max_waiting_tokens
    if requests is None:
        requests = max(WAITING_PER_RUNNING * num_running, MIN_WAITING)
    if tokens is None:
        tokens = max(WAITING_PER_RUNNING * num_running * TOKENS_PER_WAITING, MIN_WAITING_PROMPTS * max_model_len)
    return {"max_num_seqs": num_running, "max_waiting_requests": requests, "max_waiting_tokens": tokens}


def _resolve_block_size(arguments: argparse.Namespace) -> int:
    """Return the tokens in a block, for which keys are made before an engine has loaded."""
    if arguments.block_size is not None:
        return int(arguments.block_size)
    return VLLM_BLOCK_SIZE if arguments.executor == "vllm" else DEFAULT_BLOCK_SIZE


def _resolve_sizes(
    arguments: argparse.Namespace, checkpoint: CheckpointInfo, block_size: int
) -> tuple[int, int | None]:
    """Return (max_model_len, num_blocks) that fit each other. The engine counts blocks that depend on memory."""
    asked, most = arguments.max_model_len, checkpoint.max_model_len
    if asked is not None and asked > most:
        raise CheckpointError(f"--max-model-len {asked} is larger than the model's maximum of {most}")
    wanted = asked or most
    num_blocks = arguments.num_blocks
    if num_blocks is None:
        return wanted, None
    capacity = (num_blocks - 1) * block_size
    if capacity < 2:
        raise CheckpointError(f"--num-blocks {num_blocks} is too small: the null block takes one")
    if wanted <= capacity:
        return wanted, num_blocks
    if asked is not None:
        raise CheckpointError(
            f"--max-model-len {asked} does not fit the KV cache of {capacity} tokens "
            f"({num_blocks} blocks of {block_size}, one of them the null block)"
        )
    log.info("config.context_shortened", max_model_len=capacity, model_max_len=wanted, num_blocks=num_blocks)
    return capacity, num_blocks


def _model_name(model: str) -> str:
    """Return the name by which clients ask for it: a hub id, or that of a folder or file, without its part number."""
    path = Path(model)
    if path.is_file():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.resolve().name if path.is_dir() else model
