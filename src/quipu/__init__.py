"""quipu: an LLM inference server that keeps books.

`actors/`, `kernels/` and `web/` are importable only as `quipu.actors`, `quipu.kernels` and `quipu.web`; the links
beside this file make them so in a checkout, and the wheel holds them as ordinary folders.
"""

__version__ = "0.1.0"
