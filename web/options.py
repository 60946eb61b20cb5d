"""What an operator decides about the web layer. Made by the command line, read by the app."""

from __future__ import annotations

import attrs

from .auth.browser_rules import BrowserRules


@attrs.frozen(kw_only=True)
class AppOptions:
    """Every limit and time of the web layer has its name here."""

    domain: str = "default"
    """The one tenant, where no keys were asked for; otherwise each key has its own."""
    open_admin: bool = False
    """Without keys, admin routes answer everybody. Otherwise only this machine."""
    browsers: BrowserRules = attrs.field(factory=BrowserRules)
    """Which hosts and origins are served. `quipu serve` decides it from its flags; by default all of them."""
    always_include_usage: bool = False
    """Streams carry usage without being asked, for operators who meter at a gateway."""
    allow_client_priority: bool = False
    """Any request may name a `priority`. Otherwise only those whose key may."""
    keep_billing_header: bool = False
    """Claude Code's `x-anthropic-billing-header` is rendered into prompts, which then differ in each session."""
    max_body_bytes: int = 8 << 20
    """Of one request; a larger one is answered with 413."""
    max_body_memory_bytes: int = 256 << 20
    """Of all bodies under way together, as received and as parsed; beyond it requests are answered with 503."""
    body_timeout_s: float = 60.0
    """How long a body may take to arrive."""
    max_sequences: int = 512
    """Prompts of one request times its `n`."""
    request_timeout_s: float | None = None
    """From receipt to the end of the answer; None is for ever."""
    heartbeat_s: float = 15.0
    """Silence after which a stream sends a comment; up to a quarter more where its chunks go past the body."""
    direct_streams: bool = True
    """Chunks of a stream go to its client's socket past the response body, where the connection allows it
    (`http/direct_write.py`). Off in tests and measurements of the other way."""
    sink_limit_bytes: int = 4 << 20
    """What may wait for one client that does not read, before its request is ended."""
    all_sinks_limit_bytes: int = 256 << 20
    """What may wait for all clients together, before the request of the one that has left most unread is ended."""
