"""Why a process died of SIGBUS: whether a checkpoint's file is shorter than its header says.

Used by `process_host.py` when an engine has died so. A file that is cut off while it is mapped passes every check at
the start and then kills whoever reads what is gone; another engine would be refused, or die, in the same way. Without
torch, which the web process does not load.
"""

from __future__ import annotations

import json
from pathlib import Path

_LENGTH_BYTES = 8


def find_cut_off(folder: Path) -> str | None:
    """Return which safetensors file of a checkpoint is cut off, in words; None if all have what their headers say."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = json.loads(file.read(min(length, size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = _LENGTH_BYTES + length + max(ends, default=0)
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return f"{path.name} has no valid header any more"
        if size < expected:
            return f"{path.name} is cut off: it has {size} bytes, and its header says {expected}"
    return None
