"""The HTTP client library on which the installed `openai` is built: httpx2 in newer releases, httpx in older ones."""

from __future__ import annotations

try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]  # only one of the two branches runs

__all__ = ["httpx"]
