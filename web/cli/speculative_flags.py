"""What the flags of speculative decoding mean together, and with the checkpoints.

Used by `settings.py`. What must always hold: a flag that has no effect is refused, and so is a draft model whose tokens
are not the model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quipu.actors.config.pooling_config import Task
from quipu.actors.shared.checkpoint import CheckpointError, CheckpointInfo, read_info, resolve
from quipu.actors.shared.tokenizers_library import load_library


def resolve_speculation(
    arguments: argparse.Namespace, task: Task, checkpoint: CheckpointInfo, max_model_len: int, *, on_cluster: bool
) -> dict[str, Any]:
    """Return the settings of an engine that concern guesses. Raises CheckpointError.

    By default they come from everything, where verifying them changes no bit and may pay.
    """
    speculative, asked = arguments.speculative, arguments.draft_model
    if task is not Task.GENERATE and (speculative not in (None, "off") or asked is not None):
        raise CheckpointError(
            f"--task {task}: nothing is drafted without outputs: --speculative must be off, without --draft-model"
        )
    if arguments.executor == "vllm" and speculative not in (None, "off"):
        raise CheckpointError(
            f"--speculative {speculative}: the vllm executor verifies no drafts; vLLM's own server does, which can be "
            "put behind this one: --upstream (docs/operate/upstreams.md)"
        )
    if arguments.draft_model_costs is not None and asked is None:
        raise CheckpointError("--draft-model-costs needs --draft-model")
    if asked is None:
        pays = arguments.executor in ("auto", "cpu", "triton") and task is Task.GENERATE
        return {"speculative": speculative or ("suffix" if pays else "off")}
    if speculative == "off":
        raise CheckpointError("--draft-model needs --speculative ngram or suffix: with off nothing is verified")
    if arguments.executor in ("vllm", "transformers", "fake"):
        raise CheckpointError(
            f"--draft-model: the {arguments.executor} executor runs none; cpu, triton and reference do"
        )
    if on_cluster:
        raise CheckpointError("--draft-model: engines on a cluster do not fetch it")
    if (arguments.draft_model_costs is None) != (arguments.speculative_costs is None):
        raise CheckpointError("--draft-model needs both --speculative-costs and --draft-model-costs, or neither")
    path = _check_draft_model(asked, checkpoint, max_model_len)
    return {"speculative": speculative or "suffix", "draft_model": str(path)}


def _check_draft_model(asked: str, checkpoint: CheckpointInfo, max_model_len: int) -> Path:
    """Return the draft model's folder. Raises CheckpointError if it cannot read and write the same texts."""
    path = resolve(asked)
    draft = read_info(path)
    if draft.vocab_size != checkpoint.vocab_size:
        raise CheckpointError(
            f"--draft-model {asked} has a vocabulary of {draft.vocab_size} tokens, and {checkpoint.name} of "
            f"{checkpoint.vocab_size}: they must be the same"
        )
    if draft.max_model_len < max_model_len:
        raise CheckpointError(
            f"--draft-model {asked} reads up to {draft.max_model_len} tokens, and --max-model-len is {max_model_len}: "
            f"lower it"
        )
    ours, theirs = (
        load_library(folder).tokenizer.get_vocab(with_added_tokens=True) for folder in (checkpoint.path, path)
    )
    if ours != theirs:
        raise CheckpointError(f"--draft-model {asked} has other tokens than {checkpoint.name}: they must be the same")
    return path
