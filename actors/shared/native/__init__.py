"""Whether the part of this package that is written in C is there.

It is where it was installed with a C compiler at hand; everything in it stands in Python too and says the same there.
`QUIPU_COMPILED=0` in the environment goes without it, to compare or to look for a fault.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

IS_COMPILED = os.environ.get("QUIPU_COMPILED") != "0" and find_spec("quipu.actors.core.native") is not None
