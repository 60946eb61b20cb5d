"""What can be checked of an installation without installing: bounds, resolution by pip, the choice of torch's build.

`make test-installs` installs, serves and chats in clean environments; these are the parts that take seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread

import pytest
from packaging.requirements import Requirement

from scripts import install_torch
from tests.installs.environments import ROOT, TORCH, dependencies, oldest, pip_environment, without_upper_bound

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (12, 17, 24, 26, 27, 28, 31, 34, 35, 39)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
"""Those that wheels are built for: pip compares each file of an index with each, half of its time if they are all."""
CUDA = re.compile("cuda|nvidia|triton")
PINS = ROOT / "constraints.txt"


def test_every_dependency_is_bounded() -> None:
    """Every dependency has an upper bound, and states the oldest version that works."""
    assert without_upper_bound(dependencies()) == []
    assert without_upper_bound(["a>=1", "b>=1,<2", "c==3"]) == ["a>=1"]
    assert len(list(oldest(dependencies()))) == len(dependencies())


def test_pins_are_within_the_bounds() -> None:
    """The versions that `make install` installs are within the bounds of the package."""
    lines = PINS.read_text("utf-8").splitlines()
    pins = {name: version for name, _, version in (line.partition("==") for line in lines) if version}
    for requirement in map(Requirement, dependencies()):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert not list(filter(CUDA.match, pins)), "each build of torch needs its own of these, or none"
    assert TORCH is not None and pins["torch"] == TORCH[1]


def of_every_torch() -> list[str]:
    """Return what every build of torch requires; CUDA builds add packages of NVIDIA's and a triton of their own."""
    found = [Requirement(each) for each in metadata.requires("torch") or []]
    return [str(each) for each in found if "extra" not in str(each.marker or "") and not CUDA.match(each.name)]


@pytest.mark.parametrize(("python", "is_pinned"), [("3.11", True), ("3.13", False)], ids=["pinned", "newest"])
def test_plain_pip_resolves(python: str, is_pinned: bool, tmp_path: Path) -> None:
    """A pip that knows only PyPI resolves all dependencies except torch, which is gigabytes."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--target", str(tmp_path / "nowhere"), "--only-binary=:all:", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["-c", str(PINS)] if is_pinned else []
    command += [each for each in dependencies() if Requirement(each).name != "torch"] + of_every_torch()
    done = subprocess.run(
        command, env=pip_environment(is_plain=True), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "nowhere").exists()


@contextmanager
def index_of(status: int) -> Iterator[str]:
    """Serve an index of packages whose page of torch has this status."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/cpu/torch/" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/cpu"
        finally:
            server.shutdown()
            thread.join()


def test_choice_of_torch(tmp_path: Path) -> None:
    """Without an NVIDIA GPU, torch, and nothing else, comes from the index of CPU builds if that answers."""
    with index_of(200) as index:
        chosen = install_torch.choose("2.13.0", index, has_gpu=False)
        assert chosen == ["--no-deps", "--index-url", index, "torch==2.13.0+cpu"]
        assert install_torch.choose("2.13.0", index, has_gpu=True) == ["torch==2.13.0"]
    assert install_torch.choose("2.13.0", index, has_gpu=False) == ["torch==2.13.0"], "nobody listens there now"
    with index_of(403) as index:
        assert install_torch.choose("2.13.0", index, has_gpu=False) == ["torch==2.13.0"]
    device = tmp_path / "nvidiactl"
    assert not install_torch.has_nvidia_gpu([device])
    device.touch()
    assert install_torch.has_nvidia_gpu([device])


def test_size_is_said(tmp_path: Path) -> None:
    """One line names the build and the size of all that comes with it; a CUDA build also how to get another."""
    small = tmp_path / "torch.whl"
    small.write_bytes(bytes(2_000_000))

    def item(name: str, version: str, path: Path) -> dict[str, object]:
        return {"metadata": {"name": name, "version": version}, "download_info": {"url": path.as_uri()}}

    assert install_torch.describe([item("torch", "2.13.0+cpu", small)]) == "torch 2.13.0+cpu: 2 MB"
    large = tmp_path / "nvidia.whl"
    with large.open("wb") as file:
        file.truncate(3_000_000_000)  # sparse
    told = install_torch.describe([item("torch", "2.13.0", small), item("nvidia-cublas", "13", large)])
    assert told.startswith("torch 2.13.0 and 1 packages that it needs: 3.0 GB to download")
    assert install_torch.INDEX_VARIABLE in told
    assert install_torch.num_bytes("http://127.0.0.1:9/nothing.whl") == 0
