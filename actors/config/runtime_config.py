"""The resolved configuration of a server: every size that an actor needs, by name.

Made by `web/cli/settings.py` (or a test) from flags and the checkpoint, handed to `wiring`. An engine's part is in
`engine_config.py`. Both include the sizes of channels, so that every bound has a name.

What must always hold: whatever an operator can set is declared in these two with `setting`, and nowhere else: its flag,
default, bounds and help. To add a setting, add one field and run `python -m scripts.declared_tables` for the docs.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .cluster_config import ClusterConfig
from .declarations import setting, settings_of
from .engine_config import EngineConfig
from .engine_roles import EngineRole, why_no_roles
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
    submit_window: int = 512
    """Sequences of one request that engines may hold at a time; the others are submitted as these end."""
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
        maximum=3600,
        metavar="SECONDS",
        help="time limit for compiling the chat template, and for rendering a request, which otherwise gets a 400",
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
        help="limit on the CPU time for compiling a grammar; a request whose grammar takes longer gets a 400",
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
        help="how the model writes its reasoning; `auto`: as its checkpoint says; `none`: reasoning is text",
        group="text",
    )
    explain_requests: int = setting(
        10_000,
        "--explain-requests",
        minimum=0,
        maximum=1_000_000,
        metavar="N",
        help="number of recent requests for which GET /v1/cache/explain shows blocks, messages and advice "
        "(64 MiB at most); older ones are explained from their usage records",
        group="log",
    )
    lora_modules: Mapping[str, str] = attrs.field(factory=dict)
    """Folders of adapters that are loaded when the engines start, by the names under which they are served."""
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
        help="what happens to the requests of an engine that dies: the next engine resumes them, or they fail",
        group="supervision",
    )
    resume_on: str = setting(
        "any",
        "--resume-on",
        choices=("any", "same"),
        help="which engine resumes the requests of one that died; `any`: one that computes the same bits if it is "
        "ready, else any; `same`: only one that computes the same bits",
        group="supervision",
    )
    num_engines: int = setting(
        1,
        "--engines",
        minimum=0,
        maximum=MAX_ENGINES,
        reader="engines",
        metavar="N|ROLE:N,...|ray:...",
        help="number of engine processes, to which prompts are routed (docs/operate/many-engines.md), or numbers by "
        "role (`prefill:1,decode:3`; `mixed` does both); with `ray:` they run on the nodes of a Ray cluster "
        "(docs/operate/many-machines.md)",
        resolved="1, or 0 if there is an --upstream",
        group="router",
        key="engines",
    )
    engine_roles: tuple[EngineRole, ...] = ()
    """Of the engines that are started first, in the order of their ids. Empty: all are mixed."""
    prefill_local_tokens: int = setting(
        256,
        "--prefill-local-tokens",
        minimum=0,
        metavar="N",
        help="with roles: tokens of a prompt that an engine for decoding computes itself rather than leave the prompt "
        "to one for prefill; 0: none, unless all blocks of the prompt are cached there",
        group="router",
    )
    min_engines: int = setting(
        0,
        "--min-engines",
        minimum=1,
        maximum=MAX_ENGINES,
        metavar="N",
        help="minimum number of engines; if lower than --max-engines, engines are added and removed with the load",
        resolved="--engines",
        group="router",
    )
    max_engines: int = setting(
        0,
        "--max-engines",
        minimum=1,
        maximum=MAX_ENGINES,
        metavar="N",
        help="maximum number of engines",
        resolved="--engines",
        group="router",
    )
    scale_up_after_s: float = setting(
        5.0,
        "--scale-up-after",
        above=0,
        metavar="SECONDS",
        help="seconds for which work must have waited on all engines before one is added",
        group="router",
    )
    scale_down_after_s: float = setting(
        300.0,
        "--scale-down-after",
        above=0,
        metavar="SECONDS",
        help="seconds for which the other engines must have had room for an engine's load before it is removed",
        group="router",
    )
    cluster: ClusterConfig | None = None
    """None: the engines run on this machine."""
    routing: str = setting(
        "prefix",
        "--routing",
        choices=("prefix", "dynamo", "least-loaded", "round-robin", "random"),
        help="how an engine is chosen for a prompt: by its cached prefixes and its load (`prefix`, or `dynamo` with "
        "the cost function that NVIDIA Dynamo documents), by its load alone, or by neither",
        group="router",
    )
    affinity_tokens: int = setting(
        512,
        "--affinity-tokens",
        minimum=0,
        metavar="N",
        help="number of prompt tokens that may be recomputed so that a client (`prompt_cache_key`, `user`, or the user "
        "id in Anthropic's metadata) is served by the engine that served it last",
        group="router",
    )
    host_cache_hit_weight: float = setting(
        0.75,
        "--router-host-cache-hit-weight",
        minimum=0,
        maximum=1,
        metavar="WEIGHT",
        help="what a cached block in an engine's tier in the host's memory is worth to the router, where one on the "
        "device is worth 1",
        group="router",
    )
    disk_cache_hit_weight: float = setting(
        0.25,
        "--router-disk-cache-hit-weight",
        minimum=0,
        maximum=1,
        metavar="WEIGHT",
        help="the same of a block on an engine's disk",
        group="router",
    )
    remote_cache_hit_weight: float = setting(
        0.1,
        "--router-remote-cache-hit-weight",
        minimum=0,
        maximum=1,
        metavar="WEIGHT",
        help="the same of a block in the object store, which every engine can load",
        group="router",
    )
    stats_window_s: float = setting(
        3600.0,
        "--stats-window",
        minimum=12,
        maximum=7 * 24 * 3600,
        metavar="SECONDS",
        help="time window in seconds of `GET /v1/cache/stats` and of the metrics of the same numbers "
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

    @property
    def why_no_roles(self) -> str | None:
        """Why engines cannot have roles, if they cannot."""
        return why_no_roles(resumes=self.on_engine_death == "resume", autoscales=self.autoscales)

    def role_of(self, engine_id: int) -> EngineRole:
        """Return the role that an engine has when the server starts."""
        return self.engine_roles[engine_id] if engine_id < len(self.engine_roles) else EngineRole.MIXED


SETTINGS = (*settings_of(EngineConfig), *settings_of(RuntimeConfig), *settings_of(ClusterConfig))
"""Every setting of the engine and the actors."""
