"""Make another environment's packages importable in this one: `python -m tests.gpu.borrow OTHER_PYTHON`.

For an environment that adds one large package to those already installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    command = [sys.argv[1], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    # read at start-up; addsitedir also processes the other's .pth files, such as the one for this checkout
    line = f"import site; site.addsitedir({folder!r})\n"
    (Path(sysconfig.get_path("purelib")) / "borrowed.pth").write_text(line)


if __name__ == "__main__":
    main()
