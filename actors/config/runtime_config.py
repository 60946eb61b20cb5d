"""The resolved configuration of a server: every size that an actor needs, by name.

Made by `web/cli/settings.py` (or a test) from flags and the checkpoint, handed to `wiring`. An engine's part is in
`engine_config.py`. Both include the sizes of channels, so that every bound has a name.

What must always hold: whatever an operator can set is declared in these two with `setting`, and nowhere else: its flag,
default, bounds and help. To add a setting, add one field and run `python -m scripts.declared_tables` for the docs.
"""

from __future__ import annotations

import attrs

from .cluster_config import ClusterConfig
from .declarations import setting, settings_of
from .engine_config import EngineConfig
from .upstream_config import UpstreamConfig

MAX_ENGINES = 1024
"""Most engines that one web process may have."""
MAX_GRAMMAR_BYTES = 1 << 18
"""Largest grammar that any configuration allows: it takes about a millisecond to write as JSON."""


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """What the actors of the web process need in addition."""

    engine: EngineConfig
    model_names: tuple[str, ...]
    """The first is the model's own name; requests may use any of them."""
    vocab_size: int
    kv_dtype: str
    """Part of every block key."""
    submit_slots: int = 256
    """Submits that may wait for the engine."""
    token_cache_bytes: int = 64 << 20
    """Size of the cache of chat turns' texts and token ids, with which only new turns are tokenized; 0 disables it."""
    encode_slots: int = 256
    """Requests that may wait in the tokenizer's inbox."""
    max_encode_waiting: int = 8192
    """Requests that may wait for a text worker: this many with short texts and as many with long ones, half of each for
    one tenant."""
    max_encode_waiting_bytes: int = 512 << 20
    """Bytes of their texts, likewise."""
    chat_template_timeout_s: float = setting(
        5.0,
        "--chat-template-timeout",
        above=0,
        metavar="SECONDS",
        help="time limit for compiling the chat template, and for rendering one request, which gets a 400 beyond it",
        group="text",
    )
    max_grammar_bytes: int = setting(
        131072,
        "--max-grammar-bytes",
        minimum=1,
        maximum=MAX_GRAMMAR_BYTES,
        metavar="BYTES",
        help="maximum size of the JSON schema or other grammar that an output has to match",
        group="text",
    )
    grammar_timeout_s: float = setting(
        0.5,
        "--grammar-timeout",
        above=0,
        maximum=60,
        metavar="SECONDS",
        help="limit on the processor time to compile a grammar; a request whose grammar takes longer gets a 400",
        group="text",
    )
    tool_call_parser: str = setting(
        "auto",
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls (docs/use/tool-calls.md); `auto`: as its checkpoint says; `none`: calls "
        "are text",
        group="text",
    )
    reasoning_parser: str = setting(
        "auto",
        "--reasoning-parser",
        metavar="NAME",
        help="how the model writes what it thinks before it answers; `auto`: as its checkpoint says; `none`: that is "
        "text",
        group="text",
    )
    explain_requests: int = setting(
        10_000,
        "--explain-requests",
        minimum=0,
        maximum=1_000_000,
        metavar="N",
        help="number of the last requests for which GET /v1/cache/explain has the blocks, the messages and advice "
        "(64 MiB at most); older ones are explained from their usage records",
        group="log",
    )
    report_slots: int = 16
    """Step reports that may wait for the accountant, and token batches for the detokenizer."""
    max_open_requests: int = 4096
    max_prompt_scores: int = 1 << 22
    """Prompt positions of one request, times the tokens reported for each (`echo` with `logprobs`, `prompt_logprobs`);
    12 bytes each are kept until the request ends."""
    max_output_scores: int = 1 << 25
    """The same for the maximum output of all its choices."""
    on_engine_death: str = setting(
        "resume",
        "--on-engine-death",
        choices=("resume", "fail"),
        help="what becomes of the requests that a dead engine held: the next one goes on with them, or they fail",
        group="supervision",
    )
    resume_on: str = setting(
        "any",
        "--resume-on",
        choices=("any", "same"),
        help="which of several engines may go on with a dead one's requests: one that computes the same bits where one "
        "is ready, else any; or only one that computes the same bits",
        group="supervision",
    )
    num_engines: int = setting(
        1,
        "--engines",
        minimum=0,
        maximum=MAX_ENGINES,
        reader="engines",
        metavar="N|ray:N",
        help="number of engine processes, among which prompts are routed (docs/operate/many-engines.md); with `ray:` "
        "they run on the nodes of a Ray cluster (docs/operate/many-machines.md)",
        resolved="1, or 0 if there is an --upstream",
        group="router",
        key="engines",
    )
    min_engines: int = setting(
        0,
        "--min-engines",
        minimum=1,
        maximum=MAX_ENGINES,
        metavar="N",
        help="fewest engines; if it is lower than --max-engines, engines are added and removed as the load demands",
        resolved="--engines",
        group="router",
    )
    max_engines: int = setting(
        0,
        "--max-engines",
        minimum=1,
        maximum=MAX_ENGINES,
        metavar="N",
        help="most engines",
        resolved="--engines",
        group="router",
    )
    scale_up_after_s: float = setting(
        5.0,
        "--scale-up-after",
        above=0,
        metavar="SECONDS",
        help="add an engine once work has waited on all engines for so long",
        group="router",
    )
    scale_down_after_s: float = setting(
        300.0,
        "--scale-down-after",
        above=0,
        metavar="SECONDS",
        help="remove an engine once the others have had room for its load for so long",
        group="router",
    )
    cluster: ClusterConfig | None = None
    """None: the engines run on this machine."""
    routing: str = setting(
        "prefix",
        "--routing",
        choices=("prefix", "dynamo", "least-loaded", "round-robin", "random"),
        help="how an engine is chosen for a prompt: by what it has cached and has to do (`prefix`, or with the cost "
        "that NVIDIA Dynamo documents), by what it has to do, or by neither",
        group="router",
    )
    affinity_tokens: int = setting(
        512,
        "--affinity-tokens",
        minimum=0,
        metavar="N",
        help="prompt tokens that may be computed again so that a client (`prompt_cache_key`, `user`, or the user id in "
        "Anthropic's metadata) is served by the engine that served it last",
        group="router",
    )
    stats_window_s: float = setting(
        3600.0,
        "--stats-window",
        minimum=12,
        maximum=7 * 24 * 3600,
        metavar="SECONDS",
        help="how far back `GET /v1/cache/stats` and the metrics of the same numbers look "
        "(docs/operate/cache-stats.md)",
        group="cache",
    )
    upstreams: tuple[UpstreamConfig, ...] = ()
    """Servers to which requests for their models are passed on."""
    max_restarts: int = 5
    """Engine deaths within `restart_window_s` after which the server gives up. Those of engines that had done some work
    do not count."""
    step_timeout_s: float = setting(
        300.0,
        "--step-timeout",
        minimum=0,
        metavar="SECONDS",
        help="restart the engine if a step takes longer; 0: never",
        group="supervision",
    )
    """Generous, because the first step of its kind may have to compile kernels."""
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.05
    """Doubled at every restart within the window."""

    @property
    def autoscales(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.min_engines < self.max_engines


SETTINGS = (*settings_of(EngineConfig), *settings_of(RuntimeConfig), *settings_of(ClusterConfig))
"""Every setting of the engine and the actors."""
