"""What a server is started with, resolved: every size that an actor needs, by name.

Made by `web/cli/cli.py` (or a test) from flags and the checkpoint, handed to `wiring`, and sent to the engine process
as JSON. Sizes of channels stand here too, so that every bound has a name.
"""

from __future__ import annotations

import attrs


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


@attrs.frozen
class EngineConfig:
    """Everything the engine side needs; crosses the process border as JSON."""

    model_path: str
    """A folder in the Hugging Face layout."""
    executor: str
    """Name of a backend: `auto`, `cpu`, `reference` or `fake`."""
    dtype: str
    load_format: str
    block_size: int
    num_blocks: int | None
    """Physical blocks of the KV cache, the null block included; None: as many as its memory holds."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; where neither this nor `memory_utilization` is said, the backend chooses."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights, passes and KV cache together."""
    may_shorten: bool = False
    """Nobody asked for `max_model_len`: it may become what the KV cache has room for."""
    determinism: str = "auto"
    """`strict`, `fast`, or `auto`: strict where that is free."""
    num_threads: int | None = None
    """That compute; None: as many as this process may use."""
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 2
    scheduling_policy: str = "fcfs"
    """`fcfs`, `priority` or `fair`."""
    long_prefill_token_threshold: int = 0
    """Longest chunk of one prompt in a step that others share; 0 is off."""
    max_waiting_requests: int = 0
    """Sequences that may wait for admission; 0 is no limit."""
    max_waiting_tokens: int = 0
    """Prompt tokens that may wait for admission; 0 is no limit."""
    max_waiting_share: float = 1.0
    """Of both, what may be one tenant's."""
    share_pending_prefixes: bool = True
    """A newcomer whose next block is being computed by somebody else waits for it, where that pays."""
    step_overhead_tokens: int = 512
    """Positions that cost as much to compute as a step does whatever is in it: what waiting has to save, for each step
    that it takes."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free while others run."""
    max_pinned_share: float = 0.5
    """Share of the blocks that prefixes with a `cache_control` may keep from being reused; 0 is none."""
    log_level: str = "info"
    fake_step_seconds: float = 0.0
    """With the fake executor: how long a step takes."""
    fake_poison_token_id: int | None = None
    """With the fake executor: a step that is fed this token raises."""
    fake_token_id: int | None = None
    """With the fake executor: draw this token and nothing else, and read no KV for it, so that a step costs nothing."""
    kv_events: KvEventsConfig | None = None
    """None: nothing is published, and nothing collected."""


@attrs.frozen
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
    chat_template_timeout_s: float = 5.0
    """How long a chat template may take for one chat, or to compile."""
    report_slots: int = 16
    """Step reports that may wait for the accountant, and token batches for the detokenizer."""
    plan_slots: int = 4
    """Plans, proposals and grants that may wait inside the engine: more than are ever in flight."""
    max_open_requests: int = 4096
    max_prompt_scores: int = 1 << 22
    """Prompt positions of one request, times the tokens that are told of each (`echo` with `logprobs`,
    `prompt_logprobs`): 12 bytes each are kept until it ends."""
    max_output_scores: int = 1 << 25
    """The same of all that its choices may put out."""
    max_restarts: int = 5
    """Engine deaths within `restart_window_s` after which the server gives up."""
    step_timeout_s: float = 300.0
    """How long one step may take before the engine counts as hung; 0 is for ever. The first one of a kind may have
    kernels to compile."""
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.05
    """Doubled at every restart within the window."""
