"""`VllmBackend`: vLLM's worker and model runner, without its engine, its scheduler and its KV manager.

The executor makes one through `load_backend`, and launches and collects each pass, from one thread. A pass is one
message to vLLM's worker (`runner_requests.py`, `scheduler_message.py`) and tokens that we draw from its logits: with
runner V1 on the host (`logit_sampler.py`), so that a pass is over when it is launched; with V2, vLLM's runner on GPUs,
on the device (`device_sampler.py`), where the next pass finds them. With several ranks, this process is the first of
them, and the others follow (`followers.py`).

What must always hold: the runner computes exactly the rows of the batch, which is checked in each pass; after a pass
that raised, it is told of every sequence anew. Results are not invariant: they depend on the batch, on chunks and on
the cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from ..backend import BackendConfig, Capabilities, FinishedPass, LaunchedPass
from ..batch import Drawn, StepBatch
from ..host_sampling import host_sampling
from ..step_errors import RunnerDiverged
from .block_arenas import BlockArenas
from .logit_sampler import LogitSampler
from .openmp_threads import keep_own_threads_apart, settle_own_threads
from .rank_messages import RunPass
from .runner_requests import RunnerRequests
from .scheduler_message import Messages
from .vllm_loading import Loaded, load

if TYPE_CHECKING:
    from .device_sampler import DeviceDraws, DeviceSampler


@attrs.define(eq=False)
class _RunningPass:
    """A pass whose tokens are on their way to the host."""

    backend: VllmBackend
    batch: StepBatch
    number: int
    draws: DeviceDraws
    answer: Any
    """vLLM's future. It holds what its runner copies to the host."""
    _drawn: Drawn | None = None

    def is_over(self) -> bool:
        return self._drawn is not None or self.draws.is_over()

    def collect(self) -> Drawn:
        return self.wait()

    def wait(self) -> Drawn:
        """Wait for the tokens, if nobody has yet."""
        if self._drawn is None:
            self._drawn = self.backend.read(self)
        return self._drawn


class VllmBackend:
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
        self._is_v2 = loaded.rank.is_v2
        self._sampler = _make_sampler(loaded, config)
        self._runner.sampler = self._sampler
        self._running: _RunningPass | None = None
        """The pass that was launched last, until it is collected."""
        self._new_threads = loaded.num_threads
        """How many threads are to compute the first pass, where the CPU does; None: they have been told."""
        self._requests = RunnerRequests(config.max_num_seqs, config.block_size)
        self._messages = Messages(config.max_model_len)
        self.capabilities = Capabilities(
            name="vllm",
            dtype=loaded.dtype,
            invariant=False,
            kv_cache_dtype=loaded.dtype,
            weights=loaded.quantization or loaded.dtype,
            num_threads=loaded.num_threads,
            runs_beside_host=self._is_v2,
            library=loaded.library,
        )

    def launch(self, batch: StepBatch) -> LaunchedPass:
        """See `Backend.launch`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        return self._launch(batch) if self._is_v2 else FinishedPass(self.step(batch))

    def step(self, batch: StepBatch) -> Drawn:
        return self._launch(batch).collect()

    def _launch(self, batch: StepBatch) -> LaunchedPass:
        requests, sampler = self._requests, self._sampler
        if self._new_threads is not None:
            settle_own_threads()
            if not self._followers:
                keep_own_threads_apart(self._new_threads)
            self._new_threads = None
        if self._running is not None and requests.needs_tokens(batch):
            self._running.wait()
        step = requests.begin(batch)
        try:
            sampler.begin(batch, step)
            self.blocks.prepare(batch.copies, step.fresh_blocks)
            message = self._messages.step(step)
            with self._followers.entering(RunPass(step, batch.copies, batch.samples)):
                if self._executor.execute_model(message) is not None:
                    raise RunnerDiverged("vLLM's runner has answered a pass without running it")
            hidden_states_ND = self._runner.execute_model_state.hidden_states
            # with V2, ranks share what was drawn in a collective
            with self._followers.together() if self._is_v2 else nullcontext():
                answer = self._executor.sample_tokens(None, non_block=True)
                if answer.done():
                    answer.result()  # raises what sampling has raised
            with torch.inference_mode():
                drawing = sampler.finish(hidden_states_ND)
        except BaseException:
            self._followers.abandon()
            self._forget()
            raise
        number = requests.launched(batch)
        if isinstance(drawing, Drawn):
            requests.collected(number, batch, _tokens_of(drawing))
            return FinishedPass(drawing)
        self._running = _RunningPass(self, batch, number, drawing, answer)
        return self._running

    def read(self, running: _RunningPass) -> Drawn:
        """Wait for what a pass draws, and note it."""
        if self._running is running:
            self._running = None
        try:
            drawn = running.draws.read()
            running.answer.result()
        except BaseException:
            self._forget()
            raise
        self._requests.collected(running.number, running.batch, _tokens_of(drawn))
        return drawn

    def _forget(self) -> None:
        """Have the runner told of every sequence anew: after a pass that raised, its state means nothing."""
        self._runner.execute_model_state = None  # else it would wait for the rest of this pass
        if self._is_v2:
            # what it was about to write may go to rows that the next message writes to, in no particular order
            states, tables = self._runner.req_states, self._runner.block_tables
            for tensor in (states.all_token_ids, states.total_len, states.num_computed_tokens, *tables.block_tables):
                tensor.clear_staged_writes()
        self._requests.forget()

    def while_idle(self) -> bool:
        return False

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        raise ValueError("the vllm executor applies no adapters")

    def unload_adapter(self, digest: str) -> None:
        raise ValueError("the vllm executor applies no adapters")

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


def _make_sampler(loaded: Loaded, config: BackendConfig) -> LogitSampler | DeviceSampler:
    num_threads = loaded.num_threads or torch.get_num_threads()
    if not loaded.rank.is_v2:
        return LogitSampler(loaded.rank.runner, num_threads, loaded.followers)
    from .device_sampler import DeviceSampler  # needs Triton, as runner V2 does

    on_host = host_sampling(num_threads)
    sampler = DeviceSampler(loaded.rank.runner, config.max_num_seqs, on_host.draw, loaded.followers)
    with torch.inference_mode():
        sampler.warm_up()
    return sampler


def _tokens_of(drawn: Drawn) -> dict[int, int]:
    return dict(zip(drawn.rows, drawn.token_ids, strict=True))
