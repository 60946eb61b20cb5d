"""The file with the keys of upstreams: it is used as a whole or not at all, and errors never show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quipu.web.cli.serve_command import make_parser
from quipu.web.cli.upstream_flags import MAX_KEY_FILE_BYTES, UpstreamError, read_upstreams

URL = "http://up.example"
KEY = "sk-of-the-upstream"


def read(path: Path) -> str | None:
    flags = ["demo", "--upstream", URL, "--upstream-key-file", str(path)]
    (upstream,) = read_upstreams(make_parser().parse_args(flags), {})
    return upstream.key


@pytest.mark.parametrize("text", [f"# ours\n{URL}/v1 {KEY}\n", f'{{"{URL}": "{KEY}"}}'])
def test_keys(tmp_path: Path, text: str) -> None:
    """Lines and JSON give the same key, also in the largest file that is read."""
    path = tmp_path / "keys"
    path.write_text(text)
    assert read(path) == KEY
    path.write_text(text.rjust(MAX_KEY_FILE_BYTES))
    assert read(path) == KEY


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{' ' * (MAX_KEY_FILE_BYTES - len(URL) - 10)}{URL} {KEY}", "larger than"),
        (f'{{"{URL}": {"[" * 100_000}', "not valid JSON"),
        (f'{{"{URL}": "{KEY}"', "not valid JSON"),
        (f'{{"{URL}": ["{KEY}"]}}', "printable ASCII"),
        (f"{URL} {KEY} {KEY}", "a URL and a key"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, words: str) -> None:
    """A file that is too large is refused, instead of a key that is cut off at its end, and so is any other fault."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UpstreamError, match=words) as refused:
        read(path)
    assert KEY[:4] not in str(refused.value)
