"""Install quipu into clean environments; serve and chat in each: `python -m tests.installs [--only 3.13]`.

Several Pythons and pips, a checkout and a wheel, the newest and the oldest dependencies within the bounds. In each the
demo model is served, both official clients ask the same question twice, the second time from the cache, and SIGTERM
ends the server with 0. Prints a line for each; the exit code is 1 if one of them failed or could not be tried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anthropic
import openai

from tests.e2e import servers
from tests.installs.environments import ENVIRONMENTS, ROOT, CannotInstall, Environment, find_python, install

TEXT = " ".join(("Otto keeps an owl.", "The river passed the old mill.", "Mira lives in Ashford.") * 5)
SYSTEM = f"Answer questions about this text.\n\n{TEXT}"
QUESTION = "Where does Mira live?"


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


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


def try_one(environment: Environment, wheel: Path, folder: Path) -> str:
    """Install, serve, chat and stop; return a summary. Raises whatever went wrong."""
    python = find_python(environment.python)
    if python is None:
        raise CannotInstall(f"not run: there is no Python {environment.python}")
    begun = time.monotonic()
    command, printed = install(environment, python, wheel, folder / "installed")
    took = time.monotonic() - begun
    servers.NAMED = str(command)
    with servers.serving(folder / "served", "demo") as server:
        cached = chat(server.url)
    if cached[0] != 0 or not all(cached[1:]):
        raise AssertionError(f"cached tokens: {cached}")
    said = next((line for line in printed.splitlines() if line.startswith("torch ")), "")
    return f"installed in {took:.0f} s ({said}), cached {cached}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="try only environments whose name has this text")
    only = parser.parse_args().only
    num_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        for environment in ENVIRONMENTS:
            if only not in environment.name:
                continue
            place = Path(folder) / "environment"
            place.mkdir()
            try:
                told = f"ok    {environment.name}: {try_one(environment, wheel, place)}"
            except Exception as error:
                num_bad += 1
                told = f"FAIL  {environment.name}: {type(error).__name__}: {error}"
            print(told, flush=True)
            shutil.rmtree(place)  # gigabytes
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
