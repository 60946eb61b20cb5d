"""What a server is started with, resolved: every size that an actor needs, by name.

Made by `web/cli/settings.py` (or a test) from flags and the checkpoint, handed to `wiring`, and sent to the engine
process as JSON. Sizes of channels stand here too, so that every bound has a name.

What must always hold: whatever an operator can set is declared here with `setting` and nowhere else: its flag, default,
bounds and help. To add a setting is to add one field, and to run `python -m scripts.declared_tables` for the docs.
"""

from __future__ import annotations

import attrs

from .declarations import REQUIRED, setting, settings_of


@attrs.frozen
class KvEventsConfig:
    """Where the contents of the prefix cache are published, and how much is kept for whom."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """ZeroMQ address of the PUB socket."""
    binds: bool = True
    """Whether that is an address of ours, or a subscriber's to connect to."""
    replay_endpoint: str | None = None
    """Address that the ROUTER socket binds, which sends missed batches again; None is no replay."""
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for one subscriber; beyond it misses some."""
    max_queue_size: int = 100_000
    """Batches that may wait for the thread that sends them."""


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Everything the engine side needs; crosses the process border as JSON."""

    model_path: str
    """A folder in the Hugging Face layout."""
    dtype: str = setting(
        "auto",
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="data type of weights and KV cache; `auto`: the checkpoint's",
    )
    load_format: str = setting(
        "auto", "--load-format", choices=("auto", "dummy"), help="`dummy`: random weights in the checkpoint's shapes"
    )
    block_size: int = setting(16, "--block-size", minimum=1, help="tokens that a KV block holds")
    kv_cache_bytes: int | None = setting(
        None,
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        reader="size",
        metavar="SIZE",
        help="memory of the KV cache, such as 4GiB",
        resolved="room for sixteen of the longest prompts, in 4GiB or less; docs/loading.md",
    )
    memory_utilization: float | None = setting(
        None,
        "--gpu-memory-utilization",
        above=0,
        maximum=1,
        metavar="SHARE",
        help="share of the memory of the device that computes (also a CPU's) for weights, passes and KV cache together",
    )
    num_blocks: int | None = setting(
        None,
        "--num-blocks",
        "--num-gpu-blocks-override",
        minimum=1,
        help="KV blocks, the null block included, whatever memory they take",
        resolved="as many as the memory of the KV cache holds",
    )
    max_model_len: int = setting(
        REQUIRED,
        "--max-model-len",
        minimum=1,
        help="longest prompt and output together, in tokens",
        resolved="the model's own, shortened to what the KV cache has room for",
    )
    determinism: str = setting(
        "auto",
        "--determinism",
        choices=("auto", "strict", "fast"),
        help="`strict`: the results of a prompt are the same bits whatever its batch, chunks and cache; `auto`: strict "
        "where that is free; /server_info shows which one runs",
    )
    num_threads: int | None = setting(
        None,
        "--threads",
        minimum=1,
        help="threads that compute",
        resolved="OMP_NUM_THREADS, else as many as the CPUs that this process may use",
    )
    max_num_seqs: int = setting(256, "--max-num-seqs", minimum=1, help="maximum number of sequences in one step")
    max_num_batched_tokens: int = setting(
        2048, "--max-num-batched-tokens", minimum=1, help="maximum number of tokens in one step"
    )
    enable_prefix_caching: bool = setting(
        True, "--enable-prefix-caching", help="reuse the KV of prompts that share a prefix"
    )
    share_pending_prefixes: bool = setting(
        True,
        "--share-pending-prefixes",
        help="let a request wait a step or two for a prefix that another one is computing, where that pays",
    )
    max_pinned_share: float = setting(
        0.5,
        "--max-pinned-share",
        minimum=0,
        maximum=1,
        metavar="SHARE",
        help="share of the KV blocks that prompts marked with `cache_control` may keep from being reused; 0 is none",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "--scheduling-policy",
        choices=("fcfs", "priority", "fair"),
        help="who is admitted first: by arrival, by the request's `priority`, or by what was computed for each tenant",
    )
    long_prefill_token_threshold: int = setting(
        0,
        "--long-prefill-token-threshold",
        minimum=0,
        metavar="TOKENS",
        help="longest chunk of one prompt in a step that others share; 0 is off",
    )
    max_waiting_requests: int = setting(
        0,
        "--max-waiting-requests",
        minimum=0,
        metavar="N",
        help="sequences that may wait for admission; requests beyond that are answered with 503; 0 is no limit",
        resolved="four times --max-num-seqs, and 1024 at least",
    )
    max_waiting_tokens: int = setting(
        0,
        "--max-waiting-tokens",
        minimum=0,
        metavar="N",
        help="prompt tokens that may wait for admission, likewise",
        resolved="2048 for each of four times --max-num-seqs sequences, and eight of the longest prompts at least",
    )
    kv_events: KvEventsConfig | None = setting(  # noqa: RUF009 -- it declares the field, once
        None,
        "--kv-events-config",
        reader="kv_events",
        metavar="JSON",
        help="publish what the prefix cache holds, token ids included (docs/kv-events.md)",
        group="events",
        key="kv_events_endpoint",
    )
    log_level: str = setting(
        "info",
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="least severe messages that are logged",
        group="log",
        is_shown=False,
    )
    executor: str = setting(
        "auto",
        "--executor",
        choices=("auto", "triton", "cpu", "reference", "fake"),
        help="`triton`: kernels for an NVIDIA GPU; `cpu`: kernels compiled for this processor; `reference`: plain "
        "torch; `auto`: the first of them that can run the model; `fake` computes nothing",
        group="executor",
    )
    fake_step_seconds: float = setting(0.005, "--fake-step-seconds", group="executor")
    """With the fake executor: how long a step takes."""
    fake_poison_token_id: int | None = setting(None, "--fake-poison-token-id", group="executor")
    """With the fake executor: a step that is fed this token raises."""
    fake_token_id: int | None = setting(None, "--fake-token-id", group="executor")
    """With the fake executor: draw this token and nothing else, and read no KV for it, so that a step costs nothing."""
    eos_token_ids: tuple[int, ...]
    may_shorten: bool = False
    """Nobody asked for `max_model_len`: it may become what the KV cache has room for."""
    max_steps_in_flight: int = 2
    max_waiting_share: float = 1.0
    """Share of both limits on waiting that one tenant may use."""
    step_overhead_tokens: int = 512
    """Positions that take as long to compute as the fixed part of a step: what waiting for a pending prefix has to
    save for each step that it takes."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free while others run."""


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """What the web side's actors need besides."""

    engine: EngineConfig
    model_names: tuple[str, ...]
    """The first is the model's own name; any may be asked for."""
    vocab_size: int
    kv_dtype: str
    """Part of every block key."""
    submit_slots: int = 256
    """Submits that may wait for the engine."""
    token_cache_bytes: int = 64 << 20
    """What may be kept of chats' texts and ids, so that only new turns are tokenised; 0 is nothing."""
    encode_slots: int = 256
    """Requests that may wait for the tokenizer to look at them."""
    max_encode_waiting: int = 8192
    """Requests that may wait for a thread of the tokenizer: so many with short texts, and so many with long ones; of
    one tenant half."""
    max_encode_waiting_bytes: int = 512 << 20
    """Bytes of their texts, likewise."""
    chat_template_timeout_s: float = setting(
        5.0,
        "--chat-template-timeout",
        above=0,
        metavar="SECONDS",
        help="how long the chat template may take to compile, or to render one request, which then gets a 400",
        group="text",
    )
    report_slots: int = 16
    """Step reports that may wait for the accountant, and token batches for the detokenizer."""
    max_open_requests: int = 4096
    max_prompt_scores: int = 1 << 22
    """Prompt positions of one request, times the tokens that are told of each (`echo` with `logprobs`,
    `prompt_logprobs`): 12 bytes each are kept until it ends."""
    max_output_scores: int = 1 << 25
    """The same of all that its choices may put out."""
    max_restarts: int = 5
    """Engine deaths within `restart_window_s` after which the server gives up."""
    step_timeout_s: float = setting(
        300.0,
        "--step-timeout",
        minimum=0,
        metavar="SECONDS",
        help="restart the engine when one step takes longer; 0 is never",
        group="supervision",
    )
    """The first step of a kind may have kernels to compile."""
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.05
    """Doubled at every restart within the window."""


SETTINGS = (*settings_of(EngineConfig), *settings_of(RuntimeConfig))
"""All that an operator can set of the engine and the actors."""
