"""What a sequence's state takes from the sampling parameters of its request."""

from __future__ import annotations

import attrs

from quipu.actors.executor.batch_builder import SequenceState
from quipu.actors.messages.sampling import SamplingParams
from quipu.kernels.batch import RowSampling


def test_every_field_of_row_sampling_is_copied_by_name() -> None:
    """Give each field of `RowSampling` the value that the sampling parameters have under the same name."""
    params = SamplingParams(max_tokens=1, temperature=0.3, top_p=0.4, top_k=5, min_p=0.6, seed=7)
    state = SequenceState(slot=0, sampling=params, num_outputs=0, keys=[b""], tokens=[1])
    copied, defaults = attrs.asdict(state.row_sampling), attrs.asdict(RowSampling())
    assert copied == {name: getattr(params, name) for name in defaults}
    assert all(copied[name] != default for name, default in defaults.items()), "give the new field a value here"
