"""What pyproject.toml cannot express: a wheel contains the CPU kernels, compiled for every supported instruction set.

Each library is compiled with the flags of its instruction set only (never those of the build machine), and the one that
fits is chosen where the wheel runs. Without a C++ compiler, or on another architecture, the wheel has the sources only;
they are compiled at the first start, or the reference executor is used. An installation from a checkout compiles
nothing here: `make` does, for its own machine (see quipu/kernels/cpu/build.py).

And the description that an index of packages shows: README.md, whose links to files lead to them at `Source` of
`[project.urls]`, since an index has no files.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

sys.path.insert(0, str(Path(__file__).parent / "src"))  # the build environment does not have quipu installed

from quipu.kernels.cpu.compiling import build
from quipu.kernels.cpu.instruction_sets import INSTRUCTION_SETS, CannotBuild


class BuildWithKernels(build_ext):
    """Build extension modules, and the kernels' libraries next to their sources."""

    def run(self) -> None:
        super().run()
        if self.inplace or self.editable_mode or platform.machine() != "x86_64":
            return
        folder = Path(self.build_lib, "quipu", "kernels", "cpu", "lib")
        folder.mkdir(parents=True, exist_ok=True)
        for instruction_set in INSTRUCTION_SETS:
            try:
                shutil.copyfile(build(instruction_set), folder / f"quipu-cpu-{instruction_set.name}.so")
            except CannotBuild as error:
                print(f"warning: no CPU kernels for {instruction_set.name}: {error}", file=sys.stderr)


class DescribeWithAddresses(egg_info):
    """Write the metadata, with the addresses of what README.md links to."""

    def run(self) -> None:
        metadata = self.distribution.metadata
        source = (metadata.project_urls or {}).get("Source")
        if source and metadata.long_description:
            metadata.long_description = with_addresses(metadata.long_description, source, metadata.get_version())
        super().run()


def with_addresses(text: str, source: str, version: str) -> str:
    """Return Markdown whose links to files of the repository lead to their release at a code host."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        if re.match(r"#|[a-z]+:", target):
            return link[0]
        kind = "raw" if mark else "blob"
        return f"{mark}[{label}]({source.rstrip('/')}/{kind}/v{version}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)


if __name__ == "__main__":
    setup(cmdclass={"build_ext": BuildWithKernels, "egg_info": DescribeWithAddresses})
