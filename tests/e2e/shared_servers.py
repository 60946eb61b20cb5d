"""Which files share the servers and the browser of `conftest.py`, logits or a Ray cluster: one worker gets them all.

Otherwise each worker would start its own servers, 4 s of processor time each, or a cluster of its own, as long, or
compute the logits of all families by the reference and by transformers, 15 s. `tests/conftest.py` reads the table, and
`conftest.py` checks that no file of this folder is missing.
"""

from __future__ import annotations

SERVERS = frozenset({"tiny", "tight", "fake"})
BROWSERS = frozenset({"one_browser"})
_WITH_SERVERS = (
    "anthropic_client",
    "audit",
    "bench_serve",
    "chat",
    "client_logprobs",
    "client_outputs",
    "client_usage",
    "command_line",
    "engine_settings",
    "hostile_templates",
    "kv_events",
    "responses_client",
    "seeds",
    "typed_outputs",
    "usage_counters",
)
_WITH_BROWSER = (
    "docs_page",
    "sizing_page",
    "ui",
    "ui_adapters",
    "ui_cache",
    "ui_cords",
    "ui_keys",
    "ui_tiers",
    "ui_turns",
    "ui_usage",
)
_WITH_RAY = ("engines", "nodes", "pieces")
TOGETHER = {
    **{f"tests/e2e/test_{name}.py": "files that share servers" for name in _WITH_SERVERS},
    **{f"tests/e2e/test_{name}.py": "files that share a browser" for name in _WITH_BROWSER},
    **{f"tests/kernels/{name}/test_parity.py": "files that share logits" for name in ("cpu", "reference")},
    **{f"tests/actors/fleet/cluster/test_ray_{name}.py": "files that share Ray" for name in _WITH_RAY},
}
"""The group of each file that is in one."""
