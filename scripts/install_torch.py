"""Install the build of torch that fits the machine, and say its size first: `python -m scripts.install_torch VERSION`.

Run by `make install` with the Python of the environment, before anything else is installed: it uses nothing but the
standard library and pip. On PyPI torch for Linux is a CUDA build, with gigabytes of libraries that a machine without
an NVIDIA GPU cannot use.

    an NVIDIA GPU                            what pip is set up with: PyPI's CUDA build
    none, PyTorch's own index can be reached the CPU build of that index
    none, and it cannot                      what pip is set up with, whichever build that finds

What must always hold: only torch itself ever comes from the other index; without network it ends within seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_VARIABLE = "QUIPU_TORCH_INDEX"
"""Another index of CPU builds than `CPU_INDEX`, such as a mirror's."""
NVIDIA_DEVICES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
REACH_S = 5.0
SIZE_S = 20.0
BIG_BYTES = 1 << 30


def has_nvidia_gpu(devices: Iterable[Path] = NVIDIA_DEVICES) -> bool:
    """Return whether the driver of an NVIDIA GPU is there (under WSL: its device)."""
    return any(path.exists() for path in devices)


def is_reached(index: str) -> bool:
    """Return whether an index answers for torch."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=REACH_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def choose(version: str, index: str, *, has_gpu: bool) -> list[str]:
    """Return pip's arguments for torch `version`."""
    if not has_gpu and is_reached(index):
        return ["--no-deps", "--index-url", index, f"torch=={version}+cpu"]
    return [f"torch=={version}"]


def planned(arguments: list[str], constraints: list[str]) -> list[dict[str, Any]]:
    """Return what pip would install, as in its report. Empty if it says why it cannot; installing says so again."""
    command = [*PIP, "install", "--dry-run", "--quiet", "--report", "-", *constraints, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    try:
        report = json.loads(done.stdout)
        return list(report["install"])
    except (ValueError, LookupError, TypeError):
        return []


def num_bytes(url: str) -> int:
    """Return the size of a file to be installed, 0 if it is not known."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SIZE_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def describe(items: list[dict[str, Any]]) -> str:
    """Return one line about what comes, and how large it is."""
    sizes = {item["metadata"]["name"]: num_bytes(item["download_info"]["url"]) for item in items}
    version = next((item["metadata"]["version"] for item in items if item["metadata"]["name"] == "torch"), "")
    total = sum(sizes.values())
    others = len(sizes) - 1
    size = f"{total / 1e9:.1f} GB" if total >= 1e9 else f"{total / 1e6:.0f} MB"
    line = (
        f"torch {version} and {others} packages that it needs: {size} to download"
        if others
        else f"torch {version}: {size}"
    )
    if total > BIG_BYTES:
        line += f"; no CPU build is within reach (an index of them: {INDEX_VARIABLE}=URL)"
    return line


def main(argv: list[str]) -> int:
    """Install torch `argv[0]`, with pip's constraints in `argv[1:]`, unless it is there."""
    version, *constraints = argv
    try:
        if metadata.version("torch").partition("+")[0] == version:
            return 0
    except metadata.PackageNotFoundError:
        pass
    arguments = choose(version, os.environ.get(INDEX_VARIABLE) or CPU_INDEX, has_gpu=has_nvidia_gpu())
    if items := planned(arguments, constraints):
        print(describe(items), flush=True)
    return subprocess.run([*PIP, "install", "--quiet", *constraints, *arguments], check=False).returncode


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
