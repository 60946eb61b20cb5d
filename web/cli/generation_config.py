"""Read the sampling defaults that a checkpoint suggests in its generation_config.json.

Used by `settings.py`. A request that leaves such a field out gets the checkpoint's value, as in vLLM; what it sends
itself is never changed. What must always hold: a default is within the bounds of its field, or the server does not
start.
"""

from __future__ import annotations

from pathlib import Path

from quipu.actors.messages.sampling import SAMPLING_FIELDS
from quipu.actors.shared.checkpoint import CheckpointError, read_json
from quipu.kernels.models.entry_types import LARGEST, shown

NAME = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
"""Values of `--generation-config`: the checkpoint's own file, if it has one; no file. Any other value is a folder."""
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "stop_strings"), ([],)
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("top_h", "watermarking_config", "dola_layers", "constraints", "force_words_ids"), ()),
    "token_healing": (False,),
}
"""What changes an answer's tokens or its end in transformers and is not served, by the values without effect; null is
one for all. Lengths (`max_new_tokens`) are for requests to say, and `do_sample` is what their temperature says."""
_IGNORED_BY = f"--generation-config {NEUTRAL} ignores the file"


def read_sampling_defaults(choice: str, checkpoint: Path, vocab_size: int) -> dict[str, float]:
    """Return the defaults that differ from the server's own, by field name. Raises CheckpointError."""
    path = (checkpoint if choice == AUTO else Path(choice)) / NAME
    if choice == NEUTRAL or (choice == AUTO and not path.exists()):
        return {}
    suggested = read_json(path)
    for key, neutral in _NOT_SERVED.items():
        if (value := suggested.get(key)) is not None and value not in neutral:
            raise CheckpointError(f"{path}: {key} {shown(value)} is not supported ({_IGNORED_BY})")
    defaults: dict[str, float] = {}
    for field in SAMPLING_FIELDS:
        value = suggested.get(field.name)
        if not field.from_checkpoint or value is None:
            continue
        if type(value) is not int and (type(value) is not float or field.reader == "integer"):
            kind = "an integer" if field.reader == "integer" else "a number"
            raise CheckpointError(f"{path}: {field.name} must be {kind}, not {shown(value)} ({_IGNORED_BY})")
        if abs(value) > LARGEST:  # there are integers that no float can hold
            raise CheckpointError(
                f"{path}: {field.name} is {shown(value)}, must be at most {LARGEST:g} ({_IGNORED_BY})"
            )
        if not field.bounds.allow(value):
            raise CheckpointError(f"{path}: {field.name} must be {field.bounds.words()}, not {value} ({_IGNORED_BY})")
        if field.is_clamped:
            value = min(value, vocab_size)
        if value not in (field.default, field.same_as_off):
            defaults[field.name] = value if field.reader == "integer" else float(value)
    return defaults
