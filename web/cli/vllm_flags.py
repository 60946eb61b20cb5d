"""Flags of `vllm serve` (0.32.0) with no counterpart among those of `quipu serve`, by the reason.

Part of `foreign_flags.py`. What must always hold: each of vLLM's flags is known to quipu, or one of these tables has it
(`tests/web/cli/test_foreign_flags.py`).
"""

from __future__ import annotations

from typing import Final

ABSENT_OF_VLLM: Final = {
    "--default-chat-template-kwargs": "requests have `chat_template_kwargs` of their own",
    "--trust-request-chat-template": "it is the checkpoint's (chat_template.jinja in its folder)",
    "--exclude-tools-when-tool-choice-none": "tools are shown whatever `tool_choice` says, so that prompts share their "
    "cached prefix",
    "--tool-strict-level": "tools have a `strict` of their own",
    "--tool-parser-plugin --reasoning-parser-plugin --reasoning-config": "formats of calls and reasoning are part of "
    "quipu (--tool-call-parser, --reasoning-parser)",
    "--tool-server": "clients run the tools",
    "--response-role": "answers have the role `assistant`",
    "--return-tokens-as-token-ids --stream-interval --logits-processors": "requests have fields for what they want",
    "--logprobs-mode": "logprobs are those of the raw logits",
    "--enable-log-outputs --enable-log-deltas --max-log-len": "prompts and outputs are never logged",
    "--disable-uvicorn-access-log --disable-access-log-for-endpoints": "one line per request is logged, unless "
    "--log-level is warning",
    "--log-config-file --logging-config --log-error-stack --aggregate-engine-logging "
    "--enable-logging-iteration-details": "logs are lines of JSON (--log-level)",
    "--enable-per-request-metrics --per-request-spec-decode-metrics": "the record of each request has its times "
    "(GET /v1/usage/ID)",
    "--kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics --enable-mfu-metrics --custom-histogram-buckets "
    "--show-hidden-metrics-for-version": "/metrics has all metrics there are",
    "--collect-detailed-traces --profiler-config --enable-layerwise-nvtx-tracing --ray-workers-use-nsight": "traces of "
    "requests are sent to --otlp-traces-endpoint",
    "--enable-tokenizer-info-endpoint": "the checkpoint's folder has it",
    "--allow-credentials --allowed-methods --allowed-headers": "sites in --allowed-origins may send what the APIs need",
    "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh": "TLS is the work of a proxy in front",
    "--middleware --h11-max-incomplete-event-size --h11-max-header-count": "it is the work of a proxy in front",
    "--disable-fastapi-docs --enable-offline-docs": "the description at /openapi.json has no pages",
    "--grpc --grpc-port --enable-scale-out --tokens-only": "APIs are served over HTTP, and none for parts of a request",
    "--code-revision --tokenizer-revision": "download that revision and name its folder",
    "--config-format --hf-config-path": "edit config.json in the checkpoint's folder",
    "--skip-tokenizer-init": "prompts and answers go through the checkpoint's tokenizer",
    "--model-loader-extra-config --max-parallel-loading-workers --ignore-patterns --pt-load-map-location "
    "--use-tqdm-on-load --safetensors-load-strategy --safetensors-prefetch-block-size "
    "--safetensors-prefetch-num-threads": "--load-format is all that says how weights are loaded",
    "--allow-deprecated-quantization --quantization-config": "--quantization says it all",
    "--pooler-config": "pooling is the checkpoint's (modules.json)",
    "--enable-prompt-embeds --enable-return-routed-experts --return-sampling-mask": "prompts and answers are texts and "
    "token ids",
    "--allowed-local-media-path --allowed-media-domains": "images come in requests, and nothing is fetched",
    "--media-io-kwargs --mm-processor-kwargs --trust-request-mm-kwargs --language-model-only --skip-mm-profiling "
    "--interleave-mm-strings --disable-chunked-mm-input --enable-mm-embeds --mm-processor-cache-gb "
    "--mm-processor-cache-type --mm-processor-device --mm-device-do-normalize --mm-encoder-only --mm-encoder-tp-mode "
    "--mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
    "--mm-encoder-fp8-scale-save-margin --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-tensor-ipc "
    "--mm-shm-cache-max-object-size-mb --video-pruning-method --video-pruning-rate": "images are read as the "
    "checkpoint says, and there is no audio or video",
    "--fully-sharded-loras --lora-dtype --lora-target-modules --max-lora-cls-labels --default-mm-loras "
    "--enable-tower-connector-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras --specialize-active-lora": (
        "adapters are loaded as their folders say (--lora-modules)"
    ),
    "--compilation-config -cc -O --optimization-level --performance-mode --cudagraph-capture-sizes "
    "--max-cudagraph-capture-size --kernel-config --ir-op-priority --attention-config -ac --linear-backend "
    "--moe-backend --mamba-backend --gdn-prefill-backend --kda-decode-backend --kda-prefill-backend "
    "--sparse-indexer-topk-backend --enable-flashinfer-autotune --disable-cascade-attn --enable-flash-late-interaction "
    "--jit-monitor-mode --jit-monitor-verbose --use-fp64-gumbel --enable-hc-sp": "kernels are chosen by the processor "
    "and --executor",
    "--disable-sliding-window --disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill --kv-cache-dtype-skip-layers "
    "--mamba-block-size --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds "
    "--mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint "
    "--prefix-match-unit --prefix-cache-retention-interval --swa-bounded-replay --use-replayssm "
    "--replayssm-buffer-len": "the cache is laid out as the model needs it",
    "--scheduler-cls --worker-cls --worker-extension-cls --model-class-overrides --io-processor-plugin "
    "--additional-config": "vLLM's models run with --executor vllm, its other classes do not",
    "--all2all-backend --enable-eplb --eplb-config --expert-placement-strategy --enable-ep-weight-filter --enable-dbo "
    "--dbo-decode-token-threshold --dbo-prefill-token-threshold --enable-elastic-ep --elastic-ep-max-dp-size -ep": (
        "experts are divided like other matrices (--tensor-parallel-size)"
    ),
    "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --dcp-comm-backend --dcp-q-replicate "
    "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --enable-batch-sharded-sampling": "each matrix of a "
    "model is divided (--tensor-parallel-size), not its contexts",
    "--disable-custom-all-reduce --distributed-timeout-seconds --cpu-distributed-timeout-seconds "
    "--disable-nccl-for-dp-synchronization --enable-nccl-comm-suspend --dp-sync-interval": "ranks are processes of one "
    "machine (--tensor-parallel-size)",
    "--cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group --offload-params "
    "--offload-prefetch-step": "weights are never moved",
    "--enable-cumem-allocator --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names "
    "--weight-transfer-config": "weights stay loaded; engines can be removed while the server runs",
    "--device-ids --numa-bind --numa-bind-cpus --numa-bind-nodes": "engines are pinned to CPUs of their own where "
    "there are several (--engines)",
    "--long-prefill-token-threshold-adaptive --max-num-scheduled-tokens --prefill-schedule-interval "
    "--scheduler-reserve-full-isl": "--max-num-batched-tokens and --long-prefill-token-threshold bound a step",
    "--anthropic-disabled-thinking-effort --cohere-format --cohere-is-reasoning-model --fingerprint-mode "
    "--fingerprint-value --fail-on-environ-validation --renderer-num-workers --ec-manager-config --ec-transfer-config "
    "--engram-config --aux-output-config --diffusion-config -dc --enable-fault-tolerance --fault-tolerance-config "
    "--enable-shm-tensor-arena --enable-trace-replay --watermark --watermark-config": "nothing here corresponds to it",
}
"""By flags with the same reason."""
USE_OF_VLLM: Final = {
    "--device-memory-utilization": "use --gpu-memory-utilization instead",
    "--model-impl": "use --executor vllm or --executor transformers instead",
    "-q": "use --quantization instead",
    "-dp": "use --engines instead",
    "--spec-model": "use --draft-model instead",
    "--spec-tokens": "use --num-speculative-tokens instead",
    "--max-cpu-loras --max-num-active-seqs": "use --max-loras and --max-num-seqs, which bound them, instead",
    "--structured-outputs-config --guided-decoding-backend": "use --max-grammar-bytes and --grammar-timeout, the "
    "limits of grammars instead",
    "--max-num-partial-prefills --max-long-partial-prefills": "use --long-prefill-token-threshold instead",
    "--headless --master-addr --master-port --data-parallel-address -dpa --data-parallel-rpc-port -dpp "
    "--data-parallel-backend -dpb --data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local "
    "-dpl --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm "
    "--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
    "--dp-supervisor-probe-failure-threshold": "use --engines N, or --engines ray:N on several machines, instead",
}
NEEDLESS_OF_VLLM: Final = {
    "--chat-template-content-format": "contents are texts to every template",
    "--sse-keep-alive-interval": "a stream that is silent has a comment every 15 seconds",
    "--prefix-caching-hash-algo": "keys of blocks are SHA-256 hashes",
    "--num-scheduler-steps --use-v2-block-manager --max-seq-len-to-capture": "vLLM has removed it, too",
}
