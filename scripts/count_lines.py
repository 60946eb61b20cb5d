"""Count the product's lines of Python: `python -m scripts.count_lines [COMMIT ...]`, by default those of HEAD.

What counts are the lines of all `.py` files of `actors/`, `kernels/` and `web/`, comments and blank lines included, as
they are in the commit. With several commits, the last column is the last one less the first.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

FOLDERS = ("actors", "kernels", "web")


def count(commit: str) -> Counter[str]:
    """Return the lines of each folder. Raises CalledProcessError for an unknown commit."""
    # one line of output per line of a file, whatever the line holds: an empty pattern matches all
    command = ["git", "grep", "--text", "--count", "-e", "", commit, "--"]
    counted = subprocess.run([*command, *(f"{folder}/*.py" for folder in FOLDERS)], capture_output=True, check=True)
    lines: Counter[str] = Counter()
    for line in counted.stdout.decode().splitlines():
        _, path, number = line.rsplit(":", 2)
        lines[path.partition("/")[0]] += int(number)
    return lines


def table(commits: Sequence[str]) -> str:
    """Return a row for each folder and one for all, with a column for each commit and their difference."""
    counts = [count(commit) for commit in commits]
    rows = {folder: [each[folder] for each in counts] for folder in FOLDERS}
    rows["all"] = [each.total() for each in counts]
    return "\n".join(
        f"{name:8}" + "".join(f"{number:>9,}" for number in numbers) + f"{numbers[-1] - numbers[0]:>+9,}"
        for name, numbers in rows.items()
    )


if __name__ == "__main__":
    print(table(sys.argv[1:] or ["HEAD"]))
