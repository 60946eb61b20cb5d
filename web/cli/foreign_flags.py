"""Flags of `vllm serve` and SGLang's `launch_server` that `quipu serve` does not have, and what to do instead.

Used by `one_line_parser.py`. What must always hold: a flag that `quipu serve` has is not in here, and what is advised
exists (`tests/web/cli/test_foreign_flags.py`).
"""

from __future__ import annotations

from typing import Final


def _by_flag(advice: dict[str, str]) -> dict[str, str]:
    return {flag: text for flags, text in advice.items() for flag in flags.split()}


USE: Final = _by_flag(
    {
        "--api-keys": "use --api-key instead",
        "--chunked-prefill-size --max-prefill-tokens": "use --max-num-batched-tokens instead",
        "--context-length": "use --max-model-len instead",
        "--cors-allowed-origins": "use --allowed-origins instead",
        "--data-parallel-size --dp --dp-size": "use --engines instead",
        "--grammar-backend": "use --max-grammar-bytes and --grammar-timeout, the limits of grammars instead",
        "--load-balance-method": "use --routing instead",
        "--max-running-requests": "use --max-num-seqs instead",
        "--mem-fraction-static": "use --gpu-memory-utilization instead",
        "--page-size": "use --block-size instead",
        "--lora-paths": "use --lora-modules NAME=FOLDER instead",
        "--max-loras-per-batch": "use --max-loras instead",
        "--tp --tp-size": "use --tensor-parallel-size instead",
        "--schedule-policy": "use --scheduling-policy instead",
        "--uvicorn-log-level": "use --log-level instead",
        "--max-queued-requests": "use --max-waiting-requests instead",
        "--watchdog-timeout": "use --step-timeout instead",
        "--enable-deterministic-inference": "use --determinism instead",
        "--disable-cuda-graph": "use --enforce-eager instead",
        "--runner --convert --is-embedding": "use --task instead",
        "--disable-radix-cache": "use --no-enable-prefix-caching instead",
    }
)
NEEDLESS: Final = _by_flag(
    {
        "--enable-chunked-prefill": "long prompts are always computed in pieces (--max-num-batched-tokens: their size)",
        "--enable-auto-tool-choice": "tools may always be called (--tool-call-parser chooses the format)",
        "--enable-prompt-tokens-details --enable-cache-report": "usage always has cached tokens",
        "--enable-metrics": "/metrics is always served",
        "--enable-request-id-headers": "X-Request-Id is always sent",
        "--enable-force-include-usage": "--always-include-usage does that",
        "--disable-log-requests": "prompts are never logged",
        "--disable-log-stats": "statistics are at /metrics and not in the log",
        "--enable-log-requests": "one line per request is always logged, without its contents",
        "--async-scheduling": "steps always overlap",
        "--swap-space": "preempted requests are computed again",
        "--disable-frontend-multiprocessing": "engines always have processes of their own",
        "--tokenizer --tokenizer-path": "it is the checkpoint's",
        "--tokenizer-mode": "it is chosen by the checkpoint",
        "--device": "it is the machine's",
    }
)
ABSENT: Final = _by_flag(
    {
        "--enable-expert-parallel": "experts are divided like other matrices (--tensor-parallel-size)",
        "--pipeline-parallel-size -pp --pp-size": "each matrix of a model is divided (--tensor-parallel-size), not its "
        "layers",
        "--distributed-executor-backend": "ranks are processes of one machine; --engines ray:N runs engines on a Ray "
        "cluster",
        "--chat-template": "it is the checkpoint's (chat_template.jinja in its folder)",
        "--revision": "download that revision and name its folder",
        "--download-dir": "set HF_HOME instead",
        "--hf-token": "set HF_TOKEN instead",
        "--seed --random-seed": "requests have a `seed` of their own",
        "--speculative-config --speculative-algorithm": "choose where guesses come from with --speculative ngram or "
        "suffix; draft models and EAGLE heads are not loaded",
        "--cpu-offload-gb": "weights are never moved",
        "--hf-overrides --rope-scaling --json-model-override-args": "edit config.json in the checkpoint's folder",
        "--limit-mm-per-prompt": "models take text only",
        "--kv-transfer-config": "KV blocks are not sent between engines",
        "--ssl-keyfile --ssl-certfile": "TLS is the work of a proxy in front",
        "--root-path": "the proxy in front removes the prefix",
        "--uds": "it listens on --host and --port",
        "--config": "flags are given on the command line only",
        "--max-logprobs": "requests ask for up to 20",
        "--override-generation-config": "use --generation-config FOLDER with a generation_config.json of your own",
    }
)


def advice_of(flag: str) -> str | None:
    """Return what to do instead of another server's flag, None if it is not known."""
    name = flag.replace("_", "-")
    positive = name.replace("--no-", "--", 1)
    if name in USE:
        return f"is another server's flag: {USE[name]}"
    if positive in NEEDLESS:
        return f"is not needed: {NEEDLESS[positive]}"
    if positive in ABSENT:
        return f"is not supported: {ABSENT[positive]}"
    return None
