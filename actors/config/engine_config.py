"""The resolved configuration of an engine: every size and switch that its actors need, by name.

Part of the server's `runtime_config.py`, sent to the engine process as JSON.

What must always hold: whatever an operator can set is declared with `setting`, and nowhere else.
"""

from __future__ import annotations

import attrs

from .checkpoint_settings import CheckpointSettings
from .declarations import REQUIRED, setting
from .pooling_config import LAST_TOKEN, PoolingConfig

DEFAULT_BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 32
"""What vLLM's attention takes nearly everywhere: on CPUs it needs multiples of 32, on most GPUs of 16."""


@attrs.frozen
class KvEventsConfig:
    """Where KV events are published, and how many are buffered."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """ZeroMQ address of the PUB socket."""
    binds: bool = True
    """Whether to bind that address or to connect to it."""
    replay_endpoint: str | None = None
    """Address for the ROUTER socket, which replays missed batches; None: no replay."""
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for one subscriber, which misses those beyond."""
    max_queue_size: int = 100_000
    """Batches that may wait for the thread that sends them."""
    rank: int = 0
    """The engine's number, in every batch."""


@attrs.frozen(kw_only=True)
class EngineConfig(CheckpointSettings):
    model_path: str
    """A folder in the Hugging Face layout."""
    kv_cache_dtype: str = setting(
        "auto",
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "float16", "float32", "int8"),
        help="data type of the KV cache; `int8`: half the memory of bfloat16, with one scale per token and head "
        "(docs/operate/loading.md); `auto`: that of the weights",
    )
    tensor_parallel_size: int = setting(
        1,
        "--tensor-parallel-size",
        "-tp",
        minimum=1,
        help="ranks, each a process with a device of its own, among which each matrix is divided; more than one: only "
        "with `--executor vllm` (docs/operate/executors.md)",
    )
    block_size: int = setting(
        DEFAULT_BLOCK_SIZE,
        "--block-size",
        minimum=1,
        help="tokens in a KV block",
        resolved=f"{DEFAULT_BLOCK_SIZE}; {VLLM_BLOCK_SIZE} with --executor vllm",
    )
    kv_cache_bytes: int | None = setting(
        None,
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        reader="size",
        metavar="SIZE",
        help="memory for the KV cache of each engine, for example 4GiB",
        resolved="room for sixteen of the longest prompts, in 4GiB or less; docs/operate/loading.md",
    )
    memory_utilization: float | None = setting(
        None,
        "--gpu-memory-utilization",
        above=0,
        maximum=1,
        metavar="SHARE",
        help="share of the device's memory (a CPU's, too) for weights, activations and KV cache of all engines on it",
    )
    num_blocks: int | None = setting(
        None,
        "--num-blocks",
        "--num-gpu-blocks-override",
        minimum=1,
        help="number of KV blocks of each engine, including the null block, regardless of memory limits",
        resolved="as many as fit into the memory for the KV cache",
    )
    max_model_len: int = setting(
        REQUIRED,
        "--max-model-len",
        minimum=1,
        help="maximum length of prompt and output together, in tokens",
        resolved="the model's own, or less if the KV cache has no room for it",
    )
    determinism: str = setting(
        "auto",
        "--determinism",
        choices=("auto", "strict", "fast"),
        help="`strict`: bit-identical results whatever the batch, chunks and cache; `auto`: strict where that "
        "costs nothing; /server_info shows which is used",
    )
    enforce_eager: bool = setting(
        False,
        "--enforce-eager",
        help="launch kernels one by one, for a faster start: no CUDA graphs (triton), no compiled model (vllm); other "
        "executors always do",
    )
    num_threads: int | None = setting(
        None,
        "--threads",
        minimum=1,
        help="number of compute threads of each engine",
        resolved="OMP_NUM_THREADS, else the number of CPUs that this engine may use",
    )
    max_num_seqs: int = setting(256, "--max-num-seqs", minimum=1, help="maximum number of sequences in one step")
    max_num_batched_tokens: int = setting(
        2048, "--max-num-batched-tokens", minimum=1, help="maximum number of tokens in one step"
    )
    enable_prefix_caching: bool = setting(
        True, "--enable-prefix-caching", help="reuse the KV cache of prompts that share a prefix"
    )
    share_pending_prefixes: bool = setting(
        True,
        "--share-pending-prefixes",
        help="let a request wait a step or two for a prefix that another request is computing, if that saves time",
    )
    max_pinned_share: float = setting(
        0.5,
        "--max-pinned-share",
        minimum=0,
        maximum=1,
        metavar="SHARE",
        help="share of the KV blocks that prefixes marked with `cache_control` may pin; 0 disables pinning",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "--scheduling-policy",
        choices=("fcfs", "priority", "fair"),
        help="admission order: by arrival, by the request's `priority`, or by the tokens computed for each tenant",
    )
    long_prefill_token_threshold: int = setting(
        0,
        "--long-prefill-token-threshold",
        minimum=0,
        metavar="TOKENS",
        help="maximum chunk of one prompt in a step with other sequences; 0: no maximum",
    )
    max_waiting_requests: int = setting(
        0,
        "--max-waiting-requests",
        minimum=0,
        metavar="N",
        help="maximum number of sequences that wait for admission; further requests get a 503; 0: no limit",
        resolved="four times --max-num-seqs, at least 1024",
    )
    max_waiting_tokens: int = setting(
        0,
        "--max-waiting-tokens",
        minimum=0,
        metavar="N",
        help="maximum number of prompt tokens that wait for admission, likewise",
        resolved="2048 for each sequence that may wait by default, at least eight prompts of maximum length",
    )
    max_loras: int = setting(
        0,
        "--max-loras",
        minimum=1,
        metavar="N",
        help="maximum number of adapters that are served at a time; each engine keeps memory for one more",
        resolved="4 with adapters, or as many as --lora-modules names",
        group="adapters",
    )
    max_lora_rank: int = setting(
        0,
        "--max-lora-rank",
        minimum=1,
        maximum=512,
        metavar="RANK",
        help="highest rank of an adapter; memory for adapters grows with it",
        resolved="16 with adapters",
        group="adapters",
    )
    kv_events: KvEventsConfig | None = setting(  # noqa: RUF009 -- declares the field; called once
        None,
        "--kv-events-config",
        reader="kv_events",
        metavar="JSON",
        help="publish the contents of the prefix cache, including token ids (docs/operate/kv-events.md)",
        group="events",
        key="kv_events_endpoint",
    )
    log_level: str = setting(
        "info",
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="minimum level of the messages to log",
        group="log",
        is_shown=False,
    )
    executor: str = setting(
        "auto",
        "--executor",
        choices=("auto", "triton", "cpu", "reference", "vllm", "transformers", "fake"),
        help="`triton`: kernels for NVIDIA GPUs; `cpu`: kernels compiled for this processor; `reference`: plain torch; "
        "`auto`: the first of these that can run the model; `vllm`: the models and kernels of an installed vLLM "
        "(experimental, docs/operate/executors.md); `transformers`: nearly every decoder that an installed "
        "transformers has, more slowly; `fake`: computes nothing",
        group="executor",
    )
    fake_step_seconds: float = setting(0.005, "--fake-step-seconds", group="executor")
    """Fake executor: how long a step takes."""
    fake_poison_token_id: int | None = setting(None, "--fake-poison-token-id", group="executor")
    """Fake executor: a step with this token as input raises."""
    fake_token_id: int | None = setting(None, "--fake-token-id", group="executor")
    """Fake executor: sample only this token without reading any KV, so that a step costs nothing."""
    fake_most_tokens: int = setting(1, "--fake-most-tokens", minimum=1, maximum=16, group="executor")
    """Fake executor: the most tokens that a sequence yields in a step."""
    fake_vector_size: int = setting(16, "--fake-vector-size", minimum=1, maximum=65536, group="executor")
    """Fake executor: elements of an embedding."""
    fake_replies: str | None = setting(None, "--fake-replies", group="executor")
    """Fake executor: a JSON file with the token ids to sample, by a token that the sequence contains, -1 being any."""
    task: str = setting(
        "generate",
        "--task",
        choices=("auto", "generate", "embed", "score"),
        help="what is served: `generate` (text), `embed` (embeddings, and scores by their similarity) or `score` (a "
        "reranker's scores); `auto`: what the checkpoint was made for (docs/use/embeddings.md)",
        resolved="embed for checkpoints of sentence-transformers, score for converted rerankers, else generate",
    )
    eos_token_ids: tuple[int, ...]
    pooling: PoolingConfig = LAST_TOKEN
    """How vectors are made of outputs, where they are asked for."""
    cpus: tuple[int, ...] | None = None
    """CPUs that the engine's process is pinned to, before it loads torch; None: not pinned."""
    num_sharing: int = 1
    """Engines that share the memory of this one's device, this one included."""
    memory_share: int | None = None
    """Bytes of the host's memory that this engine may hold in all, weights included; None: what is free."""
    has_peers: bool = False
    """Whether other engines may fetch its blocks, and it theirs."""
    peer_ports: tuple[int, int] | None = None
    """The first and the last port of its node at which it may await them; None: any."""
    checkpoint_name: str | None = None
    """What all engines call the checkpoint, which may be in another folder on each machine. None: `model_path`."""
    may_shorten: bool = False
    """Whether `max_model_len` may be reduced to what the KV cache has room for: the operator did not set it."""
    max_steps_in_flight: int = 2
    max_waiting_share: float = 1.0
    """Share of both limits on waiting that one tenant may use."""
    step_overhead_tokens: int = 512
    """Positions that take as long to compute as the fixed part of a step: what waiting for a pending prefix has to
    save for each step that it takes."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free while others run."""
