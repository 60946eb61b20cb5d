"""Install a wheel into a clean environment, and ask the demo model there: `python scripts/try_wheel.py WHEEL`.

As a user without a compiler would, with pip as it is set up and torch's CPU build where there is no GPU. Used by
`make wheels` beside the container that has built the wheel, whose glibc is too old for a wheel of llguidance.
`make test-installs` tries more, and serves. Nothing but the standard library is needed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASK = """
from quipu import LLM, SamplingParams
llm = LLM("demo")
(answer,) = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=16))
assert answer.outputs[0].text, answer
print(answer.outputs[0].text)
llm.close()
"""


class CannotUse(Exception):
    """The wheel does not do what it should; the message says what was printed."""


def run(*command: str, folder: Path) -> str:
    """Run a program on a machine without a compiler and with nothing compiled before; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CXX": "no-such-compiler", "CC": "no-such-compiler", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise CannotUse(f"{' '.join(command[:4])}: {done.stdout[-3000:]}")
    return done.stdout


def try_wheel(wheel: Path) -> str:
    """Return what the demo model of a wheel answers. Raises CannotUse."""
    torch = re.search(r"(?m)^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"))
    assert torch is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        run(python, str(ROOT / "scripts" / "install_torch.py"), torch[1], folder=folder)
        run(python, "-m", "pip", "install", "--quiet", str(wheel.resolve()), folder=folder)
        code = "from quipu.kernels.cpu.build import load_kernels as load; print(load().library._name)"
        if platform.machine() == "x86_64" and str(folder) not in (used := run(python, "-P", "-c", code, folder=folder)):
            raise CannotUse(f"the kernels are not the wheel's: {used}")
        return run(python, "-P", "-c", ASK, folder=folder).splitlines()[-1]


def main(argv: list[str]) -> int:
    """Try wheels one after the other."""
    for path in argv:
        try:
            print(f"{path}: {try_wheel(Path(path))}")
        except CannotUse as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
