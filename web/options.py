"""The operator's settings for the web layer. Created by the command line, read by the app."""

from __future__ import annotations

from pathlib import Path

import attrs

from .auth.browser_rules import BrowserRules
from .auth.sealed_texts import TextSeal


@attrs.frozen(kw_only=True)
class AppOptions:
    """Every limit and timeout of the web layer."""

    domain: str = "default"
    """The only tenant of a server without keys. With keys, each key has its own."""
    open_admin: bool = False
    """Without keys: serve admin routes to everybody, not only to this machine."""
    browsers: BrowserRules = attrs.field(factory=BrowserRules)
    """Which hosts and origins are served: by default all of them. `quipu serve` sets this from its flags."""
    always_include_usage: bool = False
    """Include usage in every stream, for operators who meter at a gateway."""
    shows_vllm_metrics: bool = False
    """Metrics also have vLLM's names, where it has the same ones."""
    allow_client_priority: bool = False
    """Allow `priority` in any request, not only in those whose key allows it."""
    keep_billing_header: bool = False
    """Render Claude Code's `x-anthropic-billing-header` into prompts, which then differ in each session."""
    max_body_bytes: int = 8 << 20
    """Largest body of one request; a larger one is answered with 413."""
    max_body_memory_bytes: int = 256 << 20
    """Memory of all bodies in progress, as received and as parsed; beyond it requests are answered with 503."""
    lora_dir: Path | None = None
    """Where adapters must lie that clients load. None: they load none."""
    body_timeout_s: float = 60.0
    """How long a body may take to arrive."""
    max_sequences: int = 512
    """Prompts of one request times its `n`."""
    max_pooled_prompts: int = 2048
    """Inputs of one request for embeddings, texts of one for scores."""
    request_timeout_s: float | None = None
    """From receipt to the end of the response; None is unlimited."""
    heartbeat_s: float = 15.0
    """Silence after which a stream sends a heartbeat; up to 25 % more if its chunks are written directly."""
    serves_ui: bool = True
    """Serve the pages at `/ui`."""
    seal: TextSeal = attrs.field(factory=TextSeal)
    """Seals the summaries of compacted histories. `quipu serve` keeps its key in the data directory."""
    direct_streams: bool = True
    """Write a stream's chunks directly to its client's socket if the connection allows it (`http/direct_write.py`). Off
    in tests and measurements of the generic path."""
    sink_limit_bytes: int = 4 << 20
    """Unread bytes of one client, beyond which its request is ended."""
    all_sinks_limit_bytes: int = 256 << 20
    """Unread bytes of all clients together, beyond which the request of the client with most of them is ended."""
