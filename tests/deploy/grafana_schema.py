"""Check the dashboard against Grafana's own schema, with the classes of Grafana's SDK (grafana-foundation-sdk).

`python grafana_schema.py DASHBOARD` prints each field that the schema does not know or has with another value, and how
many values it read. It runs in the environment that has the SDK (`.venv-deploy`) and imports nothing of this
repository. The SDK reads only the fields that it knows, so what is missing afterwards was unknown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OF_DATA_SOURCE = ("titleFormat", "textFormat", "step")
"""Fields of an annotation that belong to the query of Prometheus, which the schema leaves open."""


def differences(ours: Any, read: Any, path: str = "dashboard") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(read, dict):
        for key, value in ours.items():
            if key in read:
                yield from differences(value, read[key], f"{path}.{key}")
            elif not (path.startswith("dashboard.annotations.list[") and key in OF_DATA_SOURCE):
                yield f"{path}.{key} is not in the schema"
    elif isinstance(ours, list) and isinstance(read, list) and len(ours) == len(read):
        for number, (one, other) in enumerate(zip(ours, read, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif ours != read:
        yield f"{path}: {ours!r} is read as {read!r}"


def count(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(count, value.values() if isinstance(value, dict) else value))
    return 1


def main() -> int:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    ours = json.loads(Path(sys.argv[1]).read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    found = list(differences(ours, read))
    print("\n".join(found) or f"{count(ours)} values")
    return min(1, len(found))


if __name__ == "__main__":
    sys.exit(main())
