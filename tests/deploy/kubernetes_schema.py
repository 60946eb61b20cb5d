"""Check Kubernetes objects against the schemas of its API: `python kubernetes_schema.py VERSION < OBJECTS`.

OBJECTS is a JSON list. Runs in the environment that has the schemas (`.venv-deploy`, kubernetes-validate) and imports
nothing of this repository. Prints what is wrong.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    import kubernetes_validate

    num_bad = 0
    for one in json.load(sys.stdin):
        try:
            kubernetes_validate.validate(one, sys.argv[1], strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            num_bad += 1
            said, *_ = str(error).splitlines()  # the schema follows
            print(f"{one['kind']} {one['metadata']['name']}: {said}")
    return min(1, num_bad)


if __name__ == "__main__":
    sys.exit(main())
