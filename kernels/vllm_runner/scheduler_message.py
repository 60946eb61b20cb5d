"""Says a step in the objects that vLLM's scheduler would send to its workers.

`vllm_backend.py` sends them. The fields are those of vLLM 0.32 (`vllm/v1/core/sched/output.py`), by keyword.

What must always hold: vLLM is told to draw greedily and without a seed, because `logit_sampler.py` draws in its place;
lists that are handed over are the runner's from then on; blocks are copied and cleared before the message is sent
(`kv_blocks.py`).
"""

from __future__ import annotations

from typing import Any

from .runner_requests import RunnerStep


class Messages:
    """Makes messages; vLLM must be installed."""

    def __init__(self, max_model_len: int) -> None:
        from vllm.sampling_params import SamplingParams

        self._greedy = SamplingParams(temperature=0.0, max_tokens=max_model_len, ignore_eos=True, detokenize=False)

    def step(self, step: RunnerStep) -> Any:
        """Return the `SchedulerOutput` of a pass."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        known = CachedRequestData.make_empty()
        for row in step.continued:
            known.req_ids.append(row.request_id)
            known.new_block_ids.append((list(row.new_blocks),) if row.new_blocks else None)
            known.num_computed_tokens.append(row.num_computed)
            known.num_output_tokens.append(row.num_outputs)
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=new.request_id,
                    prompt_token_ids=new.prompt_token_ids,
                    prefill_token_ids=new.prompt_token_ids,  # read by runner V2 alone
                    mm_features=[],
                    sampling_params=self._greedy,
                    pooling_params=None,
                    block_ids=(list(new.table),),
                    num_computed_tokens=new.num_computed,
                    lora_request=None,
                )
                for new in step.announced
            ],
            scheduled_cached_reqs=known,
            num_scheduled_tokens=dict(zip(step.request_ids, step.counts, strict=True)),
            total_num_scheduled_tokens=sum(step.counts),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=step.ended,
            free_encoder_mm_hashes=[],
        )
