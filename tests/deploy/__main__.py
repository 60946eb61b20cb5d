"""Check what is in `deploy/` and `.github/` with the programs that read it: `python -m tests.deploy [--only NAME]`.

    apt-get install --no-install-recommends $(make -s deploy-packages)

`make test-deploy` runs this; it needs these packages, and schemas and linters in `.venv-deploy`. Prints a line for
each check; the exit code is 1 if one of them failed or could not be run. The Dockerfile's check compiles all kernels,
and installs torch: it takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy.containers import check_compose, check_dockerfile, check_helm
from tests.deploy.github import check_forms, check_workflows
from tests.deploy.proxies import check_haproxy, check_nginx
from tests.deploy.service import check_unit
from tests.deploy.watching import check_grafana_schema, check_rules, check_with_prometheus

CHECKS: dict[str, Callable[[Path], str]] = {
    "rules and alerts": check_rules,
    "rules and dashboard in Prometheus": check_with_prometheus,
    "dashboard by Grafana's schema": check_grafana_schema,
    "nginx": check_nginx,
    "HAProxy": check_haproxy,
    "compose.yaml": check_compose,
    "Helm chart": check_helm,
    "workflows": check_workflows,
    "issue forms": check_forms,
    "Dockerfile": check_dockerfile,
    "unit for systemd": check_unit,
}
"""Each is given an empty folder, returns a summary, and raises what went wrong."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run only checks whose name has this text")
    only = parser.parse_args().only
    num_bad = 0
    for name, check in CHECKS.items():
        if only not in name:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                told = f"ok    {name}: {check(Path(folder))}"
            except Exception as error:
                num_bad += 1
                told = f"FAIL  {name}: {type(error).__name__}: {error}"
        print(f"{told} ({time.monotonic() - begun:.0f} s)", flush=True)
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
