"""The Python API: `from quipu import LLM, AsyncLLM, SamplingParams`. The same actors as a server, without HTTP.

`quipu/__init__.py` loads this package when one of its names is first used. The actors run under trio in a thread of
their own (`engine_thread.py`), and engines in processes of their own, so that callers may be synchronous, or run under
trio or asyncio. Requests are read and answered by the modules that serve `/v1/completions` and `/v1/chat/completions`:
fields, errors and usage are theirs.
"""
