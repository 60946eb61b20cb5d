"""The parts of `shared` and of the KV-block manager that are also implemented in C.

`_native` exists if a C compiler was available when the package was installed. Everything in it also exists in Python
and behaves the same there. Set `QUIPU_COMPILED=0` in the environment to run without it, for comparison or debugging.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

IS_COMPILED = os.environ.get("QUIPU_COMPILED") != "0" and find_spec(f"{__name__}._native") is not None
