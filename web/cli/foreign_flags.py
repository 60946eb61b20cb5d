"""Flags of vLLM, SGLang and llama.cpp's server that `quipu serve` does not have, and what to do instead.

Used by `one_line_parser.py`; `vllm_flags.py` has the rest of vLLM's. What must always hold: a flag that `quipu serve`
has is not in here, what is advised exists (`tests/web/cli/test_foreign_flags.py`), and the pages for those who come
from these servers say the same (`tests/test_migration_pages.py`).
"""

from __future__ import annotations

import re
from typing import Final

from .vllm_flags import ABSENT_OF_VLLM, NEEDLESS_OF_VLLM, USE_OF_VLLM


def _by_flag(advice: dict[str, str]) -> dict[str, str]:
    return {flag: text for flags, text in advice.items() for flag in flags.split()}


USE: Final = _by_flag(
    {
        "--admin-api-key": "use --admin-key instead",
        "--api-keys": "use --api-key instead",
        "--alias -a": "use --served-model-name instead",
        "--api-key-file": "use --key-file instead; `quipu keys new` writes its entries",
        "--batch-size --ubatch-size -b -ub": "use --max-num-batched-tokens instead",
        "--cache-ram -cram": "use --kv-host-memory instead",
        "--cache-type-k --cache-type-v -ctk -ctv": "use --kv-cache-dtype instead",
        "--chunked-prefill-size --max-prefill-tokens": "use --max-num-batched-tokens instead",
        "--context-length": "use --max-model-len instead",
        "--ctx-size -c": "use --max-model-len instead, the length of each sequence",
        "--cors-origins": "use --allowed-origins instead",
        "--disaggregation-mode --kv-transfer-config": "use --engines prefill:N,decode:M instead",
        "--embedding --embeddings --pooling --rerank --reranking": "use --task instead",
        "--enable-hierarchical-cache --hicache-ratio --hicache-size": "use --kv-host-memory instead",
        "--kv-offloading-size --kv-offloading-backend": "use --kv-host-memory instead",
        "--hicache-storage-backend": "use --kv-disk or --kv-remote instead",
        "--enable-priority-scheduling": "use --scheduling-policy priority instead",
        "--enable-trace": "use --otlp-traces-endpoint instead",
        "--file-storage-path": "use --data-dir instead",
        "--hf-repo -hf -hfr": "use --model owner/name, or owner/name:Q4_K_M for GGUF, instead",
        "-m": "name the model without a flag, or use --model instead",
        "--cors-allowed-origins": "use --allowed-origins instead",
        "--data-parallel-size --dp --dp-size": "use --engines instead",
        "--grammar-backend": "use --max-grammar-bytes and --grammar-timeout, the limits of grammars instead",
        "--load-balance-method": "use --routing instead",
        "--max-running-requests": "use --max-num-seqs instead",
        "--max-total-tokens": "use --kv-cache-memory or --num-blocks instead",
        "--nnodes --node-rank -r --dist-init-addr": "use --engines ray:N instead",
        "--no-webui": "use --no-ui instead",
        "--parallel -np": "use --max-num-seqs instead",
        "--reasoning-format": "use --reasoning-parser instead",
        "--sampling-defaults": "use --generation-config instead",
        "--threads-batch -t -tb": "use --threads instead",
        "--timeout -to": "use --request-timeout instead",
        "--model-draft -md --speculative-draft-model-path": "use --draft-model instead",
        "--mem-fraction-static": "use --gpu-memory-utilization instead",
        "--page-size": "use --block-size instead",
        "--lora-paths --lora": "use --lora-modules NAME=FOLDER instead",
        "--max-loras-per-batch --max-loaded-loras": "use --max-loras instead",
        "--tp --tp-size": "use --tensor-parallel-size instead",
        "--schedule-policy": "use --scheduling-policy instead",
        "--uvicorn-log-level": "use --log-level instead",
        "--max-queued-requests --max-num-queued-reqs": "use --max-waiting-requests instead",
        "--max-num-queued-tokens": "use --max-waiting-tokens instead",
        "--watchdog-timeout": "use --step-timeout instead",
        "--enable-deterministic-inference": "use --determinism instead",
        "--disable-cuda-graph": "use --enforce-eager instead",
        "--runner --convert --is-embedding": "use --task instead",
        "--disable-radix-cache": "use --no-enable-prefix-caching instead",
        **USE_OF_VLLM,
    }
)
NEEDLESS: Final = _by_flag(
    {
        "--cache-prompt": "prompts are cached unless --no-enable-prefix-caching says otherwise",
        "--cont-batching -cb": "batches are always continuous",
        "--flash-attn -fa": "the kernels have one attention",
        "--jinja": "chat templates are always Jinja",
        "--metrics --slots --props": "/metrics, /slots and /props are always served",
        "--enable-server-load-tracking": "/load always counts",
        "--warmup": "a chat is always tried before the server is ready",
        "--enable-chunked-prefill": "long prompts are always computed in pieces (--max-num-batched-tokens: their size)",
        "--enable-auto-tool-choice": "tools may always be called (--tool-call-parser chooses the format)",
        "--enable-prompt-tokens-details --enable-cache-report": "usage always has cached tokens",
        "--enable-metrics": "/metrics is always served",
        "--enable-request-id-headers": "X-Request-Id is always sent",
        "--enable-force-include-usage": "--always-include-usage does that",
        "--disable-log-requests --log-requests": "prompts are never logged",
        "--disable-log-stats": "statistics are at /metrics and not in the log",
        "--enable-log-requests": "one line per request is always logged, without its contents",
        "--async-scheduling": "steps always overlap",
        "--swap-space": "preempted requests are computed again",
        "--disable-frontend-multiprocessing": "engines always have processes of their own",
        "--tokenizer --tokenizer-path": "it is the checkpoint's",
        "--tokenizer-mode": "it is chosen by the checkpoint",
        "--device": "it is the machine's",
        **NEEDLESS_OF_VLLM,
    }
)
ABSENT: Final = _by_flag(
    {
        "--enable-expert-parallel": "experts are divided like other matrices (--tensor-parallel-size)",
        "--attention-backend": "kernels are chosen by the processor and --executor",
        "--api-server-count -asc": "one web process serves all engines",
        "--context-shift": "a sequence ends where its context is full",
        "--chat-template-kwargs": "requests have `chat_template_kwargs` of their own",
        "--gpu-layers --n-gpu-layers -ngl": "one device computes all layers (--executor)",
        "--split-mode --tensor-split --main-gpu -sm -ts -mg": "each engine has one device; --engines is their number",
        "--grammar --grammar-file --json-schema -j -jf": "requests say what an output has to match",
        "--mmproj -mm": "images are read by the checkpoint itself, if it is of a family that reads them",
        "--models-dir --models-preset": "a server has one model; others may be behind it (--upstream)",
        "--numa --cpu-mask -C": "engines are pinned to CPUs of their own where there are several (--engines)",
        "--predict --n-predict -n": "requests have a `max_tokens` of their own",
        "--preferred-sampling-params": "use --generation-config FOLDER with a generation_config.json of your own",
        "--temp --temperature --top-k --top-p --min-p --repeat-penalty": "requests have sampling fields, with defaults "
        "from --generation-config",
        "--schedule-conservativeness": "a sequence that finds no block is preempted and computed again",
        "--slot-save-path": "blocks outlive the server in --kv-disk",
        "--enable-sleep-mode --sleep-idle-seconds": "weights stay loaded; engines can be removed while the server runs",
        "--pipeline-parallel-size -pp --pp-size": "each matrix of a model is divided (--tensor-parallel-size), not its "
        "layers",
        "--distributed-executor-backend": "ranks are processes of one machine; --engines ray:N runs engines on a Ray "
        "cluster",
        "--chat-template --chat-template-file": "it is the checkpoint's (chat_template.jinja in its folder)",
        "--revision": "download that revision and name its folder",
        "--download-dir": "set HF_HOME instead",
        "--hf-token": "set HF_TOKEN instead",
        "--seed --random-seed -s": "requests have a `seed` of their own",
        "--speculative-config -sc --speculative-algorithm --spec-method": "choose where guesses come from with "
        "--speculative ngram or suffix, and --draft-model; EAGLE heads are not loaded",
        "--cpu-offload-gb": "weights are never moved",
        "--hf-overrides --rope-scaling --override-kv --json-model-override-args": "edit config.json in the "
        "checkpoint's folder",
        "--limit-mm-per-prompt": "a request may have up to 64 images, and neither audio nor video",
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file": "TLS is the work of a proxy in front",
        "--root-path --fastapi-root-path --api-prefix": "the proxy in front removes the prefix",
        "--uds": "it listens on --host and --port",
        "--config": "flags are given on the command line only",
        "--max-logprobs": "requests ask for up to 20",
        "--override-generation-config": "use --generation-config FOLDER with a generation_config.json of your own",
        **ABSENT_OF_VLLM,
    }
)

CHOICES: Final = {
    "speculative": _by_flag(
        {
            "eagle eagle2 eagle3 medusa mtp nextn mlp_speculator": "heads that draft from a model's own states are not "
            "loaded (EAGLE and others); choose ngram or suffix, and --draft-model",
            "draft draft-model draft_model standalone": "a second model is named with --draft-model",
        }
    ),
    "quantization": _by_flag(
        {
            "awq awq_marlin gptq gptq_marlin compressed-tensors auto-round modelopt modelopt_fp4 modelopt_mxfp8 quark "
            "fbgemm_fp8 auto_awq auto_gptq gpt_oss_mxfp4 bitsandbytes": "a checkpoint that is quantized is read as its "
            "config.json says, without this flag, which quantizes while loading",
        }
    ),
    "load_format": _by_flag(
        {
            "safetensors hf fastsafetensors instanttensor runai_streamer": "`auto` reads safetensors",
            "mistral pt npcache tensorizer bitsandbytes sharded_state": "weights are read from safetensors and GGUF",
        }
    ),
    "kv_cache_dtype": _by_flag({"fp8 fp8_e4m3 fp8_e5m2 fp8_inc": "choose int8, which takes as much memory"}),
}
"""What other servers let one choose, by the setting of `quipu serve`."""


def advice_of_choice(setting: str, value: str) -> str | None:
    """Return why another server's value of a setting is not to be had, None if it is not known."""
    return CHOICES.get(setting, {}).get(value.lower())


def advice_of(flag: str) -> str | None:
    """Return what to do instead of another server's flag, None if it is not known.

    vLLM also writes a part of a flag's object behind a dot, and a level behind `-O`.
    """
    name = flag.replace("_", "-").partition(".")[0]
    name = "-O" if re.fullmatch(r"-O\d", name) else name
    positive = name.replace("--no-", "--", 1)
    if name in USE:
        return f"is another server's flag: {USE[name]}"
    if positive in NEEDLESS:
        return f"is not needed: {NEEDLESS[positive]}"
    if positive in ABSENT:
        return f"is not supported: {ABSENT[positive]}"
    return None
