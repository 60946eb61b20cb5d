"""`VllmBackend`: vLLM's worker and model runner, without its engine, its scheduler and its KV manager.

The executor makes one through `load_backend` and calls `step` once a pass, from one thread. A pass is one message to
vLLM's worker (`runner_requests.py`, `scheduler_message.py`) and tokens that we draw from its logits
(`logit_sampler.py`). With several ranks, this process is the first of them, and the others follow (`followers.py`).

What must always hold: the runner computes exactly the rows of the batch, which is checked in each pass; after a pass
that raised, it is told of every sequence anew. Results are not invariant: they depend on the batch, on chunks and on
the cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import BackendConfig, Capabilities, RunsAtOnce
from ..batch import Drawn, StepBatch
from ..step_errors import RunnerDiverged
from .block_arenas import BlockArenas
from .logit_sampler import LogitSampler
from .rank_messages import RunPass
from .runner_requests import RunnerRequests
from .scheduler_message import Messages
from .vllm_loading import load


class VllmBackend(RunsAtOnce):
    """Implements `quipu.kernels.backend.Backend`."""

    def __init__(self, config: BackendConfig) -> None:
        """Load the model and allocate the cache.

        Raises ValueError without a supported vLLM, and for a model or a setting that is not served.
        """
        loaded = load(config)
        self._rank = loaded.rank
        self._executor, self._runner, self.blocks = loaded.rank.executor, loaded.rank.runner, loaded.rank.blocks
        self._followers = loaded.followers
        self._arenas = BlockArenas(self.blocks, self._followers)
        self.memory_plan = loaded.memory_plan
        num_threads = loaded.num_threads or torch.get_num_threads()
        self._sampler = LogitSampler(self._runner, num_threads, self._followers)
        self._runner.sampler = self._sampler
        self._requests = RunnerRequests(config.max_num_seqs, config.block_size)
        self._messages = Messages(config.max_model_len)
        self.capabilities = Capabilities(
            name="vllm",
            dtype=loaded.dtype,
            invariant=False,
            kv_cache_dtype=loaded.dtype,
            weights=loaded.quantization or loaded.dtype,
            strict_is_free=False,
            num_threads=loaded.num_threads,
            library=loaded.library,
        )

    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        step = self._requests.begin(batch)
        try:
            self._sampler.begin(batch, step)
            self.blocks.prepare(batch.copies, step.fresh_blocks)
            message = self._messages.step(step)
            with self._followers.entering(RunPass(step, batch.copies)):
                if self._executor.execute_model(message) is not None:
                    raise RunnerDiverged("vLLM's runner has answered a pass without running it")
            hidden_states_ND = self._runner.execute_model_state.hidden_states
            self._executor.sample_tokens(None)
            with torch.inference_mode():
                drawn = self._sampler.finish(hidden_states_ND)
        except BaseException:
            self._followers.abandon()
            self._runner.execute_model_state = None  # else it would wait for the rest of this pass
            self._requests.forget()
            raise
        self._requests.end(batch, dict(zip(drawn.rows, drawn.token_ids, strict=True)))
        return drawn

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return self._arenas.allocate(num_blocks)

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self._arenas.read(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self._arenas.write(blocks, source)

    def close(self) -> None:
        """Let vLLM free its memory. Threads of its libraries stay until the process ends."""
        self._followers.close()
        del self._executor, self._runner, self._sampler, self.blocks, self._arenas
        self._rank.close()
