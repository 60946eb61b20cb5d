"""`--engines ray:N` and `--ray-resources`: engines on the nodes of a Ray cluster, and what each gets there.

Used by `setting_flags.py` and `settings.py`.
"""

from __future__ import annotations

import argparse

import attrs
import msgspec

RAY = "ray:"


@attrs.frozen
class RayEngines:
    """The value of `--engines` for engines on a Ray cluster."""

    count: int


def parse_resources(text: str) -> dict[str, float]:
    """Parse a JSON object of amounts by the names of Ray's resources. Raises ArgumentTypeError."""
    try:
        resources = msgspec.json.decode(text, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"GPU": 1}}: {error}') from None
    for name, amount in resources.items():
        if not name or not 0 < amount < 1e9:
            raise argparse.ArgumentTypeError(f"the amount of {name!r} must be above 0, not {amount:g}")
    if not resources:
        raise argparse.ArgumentTypeError("must name at least one resource")
    return resources
