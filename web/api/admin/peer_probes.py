"""What other servers' gateways and dashboards ask: vLLM's `/load` and `/ping`, SGLang's probe that generates, and its
descriptions of server and model.

What must always hold: nothing is told that `/server_info` and `/v1/models` do not tell the same client; the probe's
token is booked, as every token is.
"""

from __future__ import annotations

from typing import Any

import trio
from quart import Response
from quart_trio import QuartTrio

import quipu
from quipu.actors.config.pooling_config import Task
from quipu.actors.messages.prompts import TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.request_desk.interface import Desk

from ...auth.caller import caller_of
from ...options import AppOptions
from ...request.errors import no_engines, raise_error_of, unavailable
from ...request.request_context import current_request_context
from ..answer import open_request
from ..generation import GenerationRequest, visible_to
from ..operation import route
from ..stream import Transcript
from .admin_schemas import GENERATE_PROBE, LOAD, MODEL_INFO, PEER_SERVER_INFO

GENERATE_ENDPOINT = "/health_generate"
PROBE_TIMEOUT_S = 20.0
"""As SGLang's."""
_PROBE_TOKEN = 0
_ARGUMENTS = {
    "tp_size": "tensor_parallel_size",
    "page_size": "block_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "schedule_policy": "scheduling_policy",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
}
"""SGLang's names of settings, and ours."""


def install_peer_probes(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the routes. `web/auth/auth.py` decides who may use them."""

    @route(app, "GET /load", LOAD)
    async def load() -> dict[str, Any]:
        return {"server_load": desk.num_open_requests}

    @route(app, "GET /get_model_info", MODEL_INFO)
    async def model_info() -> dict[str, Any]:
        info = visible_to(current_request_context().principal, desk.info)
        name = next(iter(info.all_names), None)
        return {
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "is_generation": desk.info.task is Task.GENERATE,
            "preferred_sampling_params": dict(info.sampling_defaults) or None,
            "max_context_length": info.max_model_len if info.has_engines else None,
            "vocab_size": info.vocab_size if info.has_engines else None,
        }

    @route(app, "GET /get_server_info", PEER_SERVER_INFO)
    async def server_info() -> dict[str, Any]:
        info, engines = desk.info, desk.engines()
        name = next(iter(info.all_names), None)
        total = sum(engine.blocks_total for engine in engines) * info.block_size
        return {
            "model_path": name,
            "served_model_name": name,
            **{theirs: info.settings.get(ours) for theirs, ours in _ARGUMENTS.items()},
            "dp_size": len(engines),
            "disable_radix_cache": info.settings.get("enable_prefix_caching") is False,
            "max_total_num_tokens": total or None,
            "max_req_input_len": info.max_model_len - 1 if info.has_engines else None,
            "internal_states": [
                {
                    "engine": engine.engine_id,
                    "state": engine.state,
                    "num_running_reqs": engine.num_running,
                    "num_queue_reqs": engine.num_waiting,
                    "token_usage": engine.blocks_used / engine.blocks_total if engine.blocks_total else 0.0,
                }
                for engine in engines
            ],
            "version": quipu.__version__,
        }

    @route(app, f"GET {GENERATE_ENDPOINT}", GENERATE_PROBE)
    async def generate() -> Response:
        if not desk.info.has_engines:
            raise no_engines()
        await _generate(desk, options)
        return Response(b"", content_type="text/plain; charset=utf-8")


async def _generate(desk: Desk, options: AppOptions) -> None:
    """Have one token generated from one token, or what the server is for computed of it. Raises APIError."""
    context, model = current_request_context(), desk.info.model_names[0]
    generates = desk.info.task is Task.GENERATE
    context.is_generation = True
    wanted = GenerationRequest(
        model=model,
        prompts=(TokenPrompt((_PROBE_TOKEN,)),),
        prompt_param="prompt",
        num_choices=1,
        max_tokens=1 if generates else 0,
        kind=SequenceKind.GENERATE if generates else SequenceKind.EMBED,
        max_tokens_param="max_tokens",
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
    )
    caller = await caller_of(context, b"", model)
    encode = wanted.encode(context.request_id, caller.tenant)
    ticket = open_request(encode, GENERATE_ENDPOINT, caller, desk, options, context.traced, context)
    transcript = Transcript(context.tally, True)
    with trio.move_on_after(PROBE_TIMEOUT_S):
        await ticket.start()
        ticket.mailbox.attach(transcript.consume)
        raise_error_of(await transcript.wait_closed())
        return
    raise unavailable(f"No token was generated within {PROBE_TIMEOUT_S:g} seconds.")
