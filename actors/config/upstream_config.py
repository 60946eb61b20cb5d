"""What is configured of an upstream: a server with the OpenAI API, to which requests are passed on.

Made by `web/cli/upstream_flags.py`. What must always hold: the key is in no representation of an upstream.
"""

from __future__ import annotations

import attrs

MAX_UPSTREAMS = 256
"""Most that one server may have."""


@attrs.frozen(kw_only=True)
class UpstreamConfig:
    url: str
    """Without a path, or with the one before `/v1`."""
    key: str | None = attrs.field(default=None, repr=False)
    """What is sent to it as a bearer token. None: nothing."""
    kv_events: str | None = None
    """ZeroMQ address at which it publishes its cache's contents."""
    tokenizer: str | None = None
    """A folder with its tokenizer and chat template."""
    continuous_usage: bool = False
    """It knows `stream_options.continuous_usage_stats`, so that it is asked for usage in every chunk."""

    def shown(self) -> dict[str, str | bool | None]:
        """Return what operators may see of it."""
        return {
            "url": self.url,
            "kv_events": self.kv_events,
            "tokenizer": self.tokenizer,
            "continuous_usage": self.continuous_usage,
        }
