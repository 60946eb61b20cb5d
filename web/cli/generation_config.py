"""Read the sampling defaults that a checkpoint suggests in its generation_config.json.

Used by `settings.py`. A request that leaves such a field out gets the checkpoint's value, as in vLLM; what it sends
itself is never changed. What must always hold: a default is within the bounds of its field, or the server does not
start.
"""

from __future__ import annotations

from pathlib import Path

from quipu.actors.messages.sampling import SAMPLING_FIELDS
from quipu.actors.shared.checkpoint import CheckpointError, read_json

NAME = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
"""Values of `--generation-config`: the checkpoint's own file, if it has one; no file. Any other value is a folder."""
_IGNORED_BY = f"--generation-config {NEUTRAL} ignores the file"


def read_sampling_defaults(choice: str, checkpoint: Path, vocab_size: int) -> dict[str, float]:
    """Return the defaults that differ from the server's own, by field name. Raises CheckpointError."""
    path = (checkpoint if choice == AUTO else Path(choice)) / NAME
    if choice == NEUTRAL or (choice == AUTO and not path.exists()):
        return {}
    suggested = read_json(path)
    defaults: dict[str, float] = {}
    for field in SAMPLING_FIELDS:
        value = suggested.get(field.name)
        if not field.from_checkpoint or value is None:
            continue
        if type(value) is not int and (type(value) is not float or field.reader == "integer"):
            kind = "an integer" if field.reader == "integer" else "a number"
            raise CheckpointError(f"{path}: {field.name} must be {kind}, not {value!r} ({_IGNORED_BY})")
        if not field.bounds.allow(value):
            raise CheckpointError(f"{path}: {field.name} must be {field.bounds.words()}, not {value} ({_IGNORED_BY})")
        if field.is_clamped:
            value = min(value, vocab_size)
        if value not in (field.default, field.same_as_off):
            defaults[field.name] = value if field.reader == "integer" else float(value)
    return defaults
