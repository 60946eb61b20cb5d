"""Install quipu into clean environments; serve and chat in each: `python -m tests.installs [--only 3.13]`.

Several Pythons and pips, a checkout and a wheel, uvx and pipx, the newest and the oldest dependencies within bounds. In
each the demo model is served, both official clients ask the same question twice, the second time from the cache, and
SIGTERM ends the server with 0. Wheels run without a compiler. For the Pythons and machines that are not here, only the
dependencies are resolved. Prints a line for each; the exit code is 1 if one of them failed or could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anthropic
import openai

from tests.e2e import servers
from tests.installs.environments import (
    CHECKOUT,
    ENVIRONMENTS,
    ROOT,
    TOOLS,
    UVX,
    CannotInstall,
    Environment,
    find_python,
    install,
    pip_environment,
    serving_index,
)
from tests.processes import eventually

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
"""The oldest glibc that all dependencies have wheels for."""

TEXT = " ".join(("Otto keeps an owl.", "The river passed the old mill.", "Mira lives in Ashford.") * 5)
SYSTEM = f"Answer questions about this text.\n\n{TEXT}"
QUESTION = "Where does Mira live?"


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, as for a release."""
    command = [str(TOOLS / "python"), "-m", "scripts.build_dist", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def resolve(python: str, machine: str) -> str:
    """Resolve all dependencies for a Python and a machine, none of which need be here; return a summary."""
    command = [str(TOOLS / "uv"), "--no-config", "--quiet", "pip", "compile", "--only-binary", ":all:", "--no-annotate"]
    command += ["--no-header", "--python-version", python, "--python-platform", machine, str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, env=pip_environment(is_plain=True), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotInstall(done.stderr[-1500:])
    found = done.stdout.splitlines()
    torch = next(line for line in found if line.startswith("torch=="))
    return f"{len(found)} packages, {torch}, {'with' if 'nvidia' in done.stdout else 'without'} CUDA; not run"


def openmp_runtimes(folder: Path) -> set[str]:
    """Return the OpenMP runtimes in the processes that have loaded kernels from `folder`."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            files = set(re.findall(r"/\S+", path.read_text()))
        except OSError:
            continue
        if any(file.startswith(str(folder)) and "/quipu-cpu-" in file for file in files):
            found |= {file for file in files if "libgomp" in file}
    return found


def chat(url: str) -> list[int]:
    """Ask with both clients, each twice; return the cached tokens of the answers."""
    cached = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="demo",
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
                temperature=0,
            )
            assert answer.choices[0].message.content, answer
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    with anthropic.Anthropic(base_url=url, api_key="unused") as messages:
        for _ in range(2):
            with messages.messages.stream(
                model="demo",
                max_tokens=16,
                system=SYSTEM,
                messages=[{"role": "user", "content": QUESTION}],
            ) as stream:
                message = stream.get_final_message()
            assert message.content, message
            cached.append(message.usage.cache_read_input_tokens or 0)
    return cached


def end_processes(folder: Path) -> None:
    """Kill what runs programs in `folder`: if uvx was killed, the server that it waited for is still there."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def try_one(environment: Environment, wheel: Path, folder: Path) -> str:
    """Install, serve, chat and stop; return a summary. Raises whatever went wrong."""
    python = find_python(environment.python)
    if python is None:
        raise CannotInstall(f"not run: there is no Python {environment.python}")
    begun = time.monotonic()
    (folder / "index").mkdir()
    with serving_index(folder / "index") as index:
        command, printed = install(environment, python, wheel, folder / "installed", index)
        took = time.monotonic() - begun
        servers.NAMED = str(command)
        # uvx waits for quipu as its child, so the engine is not the child of what was started
        with servers.serving(folder / "served", "demo", has_engine=environment.what != UVX) as server:
            cached = chat(server.url)
            runtimes = openmp_runtimes(folder)
        eventually(lambda: not openmp_runtimes(folder), "the engine's process ends")
    if environment.what != CHECKOUT and not (len(runtimes) == 1 and "/torch" in min(runtimes)):
        raise AssertionError(f"the kernels of the wheel do not share torch's OpenMP: {runtimes}")
    if cached[0] != 0 or not all(cached[1:]):
        raise AssertionError(f"cached tokens: {cached}")
    said = next((line for line in printed.splitlines() if line.startswith("torch ")), "")
    return f"installed in {took:.0f} s ({said}), cached {cached}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="try only environments whose name has this text")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already (default: one is built)")
    arguments = parser.parse_args()
    only = arguments.only
    num_bad = 0
    for python, machine in itertools.product(PYTHONS, MACHINES):
        name = f"Python {python}, {machine}, resolution"
        if only in name:
            try:
                print(f"ok    {name}: {resolve(python, machine)}", flush=True)
            except CannotInstall as error:
                num_bad += 1
                print(f"FAIL  {name}: {error}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [environment for environment in ENVIRONMENTS if only in environment.name]
        wheel = arguments.wheel.resolve() if arguments.wheel else build_wheel(Path(folder)) if chosen else Path()
        for environment in chosen:
            place = Path(folder) / "environment"
            place.mkdir()
            try:
                told = f"ok    {environment.name}: {try_one(environment, wheel, place)}"
            except Exception as error:
                num_bad += 1
                told = f"FAIL  {environment.name}: {type(error).__name__}: {error}"
            print(told, flush=True)
            end_processes(place)
            shutil.rmtree(place)  # gigabytes
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
