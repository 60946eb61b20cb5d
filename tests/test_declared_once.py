"""Engine settings and fields of bodies are declared once: one line is enough to parse, bound, send and document one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.config.declarations import SamplingField, Setting
from quipu.actors.config.runtime_config import SETTINGS
from quipu.actors.messages.sampling import SAMPLING_FIELDS
from scripts.declared_tables import outdated

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("actors", "kernels", "web")
DECLARING = tuple(
    map(
        Path,
        (
            "actors/config/runtime_config.py",
            "actors/config/engine_config.py",
            "actors/config/checkpoint_settings.py",
            "actors/config/speculative_settings.py",
            "actors/config/tier_settings.py",
            "actors/config/cluster_config.py",
        ),
    )
)
ADDED = (
    (
        "actors/config/engine_config.py",
        "    max_steps_in_flight: int = 2\n",
        '    made_up_limit: int = setting(7, "--made-up-limit", minimum=1, maximum=9, help="of nothing")\n',
    ),
    (
        "actors/messages/sampling.py",
        "    rules: LogitRules | None = None\n",
        '    made_up_share: float = sampling_field(0.5, "of nothing", apis=EVERY_API, above=0, maximum=1)\n',
    ),
    # the backend that applies it
    ("kernels/step_types.py", "    min_p: float = 0.0\n", "    made_up_share: float = 0.5\n"),
    (
        "web/api/body_table.py",
        '    _field("return_cached_tokens_details", *OPENAI, type=BOOLEAN),\n',
        '    _field("made_up_count", *OPENAI, messages=(3,), attribute="made_up", default=3, bounds=_LOGPROBS),\n',
    ),
    # the message that carries it
    ("actors/messages/tokenizer.py", '    cache_salt: str = ""\n', "    made_up: int = 0\n"),
)
"""File, an existing line, and the line to insert before it."""
PROBED = (
    ("--made-up-limit", "made_up_limit", "8", "10"),
    ("made_up_share", 0.25, 1.5),
    ("made_up_count", "made_up", 3, 5, 21),
)
APIS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Probe a copy of the product in which a made-up setting and a made-up field are declared."""
    copy = tmp_path_factory.mktemp("copy")
    for name in (*FOLDERS, "src", "scripts"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy / name)], check=True)  # keeps symlinks
    for name, line, added in ADDED:
        text = (copy / name).read_text()
        assert text.count(line) == 1, f"{name} does not have exactly one line {line!r}"
        (copy / name).write_text(text.replace(line, added + line))
    result = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests" / "declared_probe.py"), json.dumps(PROBED)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (copy / "src", copy, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert Path(answer["quipu"]).is_relative_to(copy)
    return answer


def test_setting_has_a_flag(found: Any) -> None:
    """The flag of a new setting is parsed, has the declared default and appears in `--help`."""
    assert found["setting"]["default"] == 7
    assert "--made-up-limit N of nothing (default: 7)" in found["setting"]["help"]


def test_setting_is_bounded(found: Any) -> None:
    """A value out of bounds is refused with the name of the flag."""
    assert "argument --made-up-limit: must be between 1 and 9, not 10" in found["setting"]["refused"]


def test_setting_is_transported_and_shown(found: Any) -> None:
    """Its value is in the JSON that the engine process is started with, in `/server_info` and in the documents."""
    assert found["setting"]["sent to the engine process"] == 8
    assert found["setting"]["server_info"] == 8
    assert found["setting"]["documents"] == [
        "| `--made-up-limit` | integer, between 1 and 9 | 7 | of nothing |",
    ]


def test_field_is_read_by_every_api(found: Any) -> None:
    """Every API that takes a new field reads it, and none names it as ignored."""
    assert found["field"]["default"] == 0.5
    assert found["field"]["read"] == {path: [0.25, None] for path in APIS}


def test_field_is_bounded(found: Any) -> None:
    """A value out of bounds is refused with the name of the field."""
    message = "Invalid value for `made_up_share`: must be greater than 0 and at most 1."
    assert found["field"]["refused"] == {path: [400, message] for path in APIS}


def test_field_is_transported_and_shown(found: Any) -> None:
    """Its value crosses the socket to the engine and reaches a backend that supports it; the documents list it."""
    assert found["field"]["received by the engine"] == 0.25
    assert found["field"]["given to the backend"] == 0.25
    assert found["field"]["documents"] == [
        "| `made_up_share` | number, greater than 0 and at most 1 | 0.5 | yes | of nothing |",
    ]


def test_body_field_is_read(found: Any) -> None:
    """A new field of a body is bounded and carried to the tokenizer where it is read, and none names it as ignored."""
    openai = [path for path in APIS if path != "/v1/messages"]
    assert {path: found["body field"]["given"][path] for path in openai} == {path: [200, 5, None] for path in openai}
    refused = [400, "Invalid value for `made_up_count`: must be between 0 and 20."]
    assert {path: found["body field"]["out of bounds"][path] for path in openai} == dict.fromkeys(openai, refused)


def test_body_field_is_refused_elsewhere(found: Any) -> None:
    """An endpoint that does not read it refuses it, and accepts a value that asks for nothing."""
    message = "Unknown parameter: `made_up_count` is not a parameter of this endpoint."
    assert found["body field"]["given"]["/v1/messages"] == [400, message]
    assert found["body field"]["neutral"] == {path: [200, 3, None] for path in APIS}


def test_body_field_is_documented(found: Any) -> None:
    """The documents say which endpoints read it, and its bounds."""
    assert found["body field"]["documents"] == ["| `made_up_count` | yes | yes | yes | refused | between 0 and 20 |"]


def test_documents_are_up_to_date() -> None:
    """The tables in `docs/` are those that `python -m scripts.declared_tables` writes."""
    assert outdated(write=False) == []


def test_defaults_are_within_bounds() -> None:
    """Declared defaults are accepted values."""
    for setting in SETTINGS:
        assert not setting.choices or setting.default in (None, *setting.choices)
    every: list[Setting | SamplingField] = [*SETTINGS, *SAMPLING_FIELDS]
    for declared in every:
        if isinstance(declared.default, int | float):
            assert declared.bounds.allow(declared.default), declared


NAMED_ELSEWHERE = {
    # responses and traces repeat them
    *("frequency_penalty", "presence_penalty", "temperature", "top_p"),
    # fields of other servers refer to it
    "repetition_penalty",
    # the tokenizer, the scheduler and the detokenizer do their part
    *("allowed_token_ids", "bad_words", "ignore_eos", "min_tokens", "seed", "stop_token_ids"),
}


@pytest.mark.parametrize("name", sorted({field.name for field in SAMPLING_FIELDS} - NAMED_ELSEWHERE))
def test_fields_are_named_once(name: str) -> None:
    """Apart from its declaration, a field that only affects sampling is named in the backends only.

    The Python API repeats names, for editors and type checkers.
    """
    drawn = [f"bench/{stem}.py" for stem in ("bodies", "body_fields", "generation_bodies", "other_bodies")]
    found = set(files_with(name, "actors", "web", *drawn)) - {Path("web/library/sampling_params.py")}
    assert found == {Path("actors/messages/sampling.py")}


@pytest.mark.parametrize("flag", sorted(flag for setting in SETTINGS for flag in setting.flags))
def test_flags_are_written_once(flag: str) -> None:
    """A flag is a literal in its declaration only; messages may mention it."""
    literals = [path for path in files_with(f'"{flag}"', *FOLDERS) if "bench" not in path.parts]
    assert len(literals) == 1
    assert literals[0] in DECLARING


def files_with(text: str, *folders: str) -> list[Path]:
    """Return the Python files in `folders` that contain `text` as whole words."""
    whole = re.compile(rf"(?<![\w-]){re.escape(text)}(?![\w-])")
    return sorted(
        path
        for folder in folders
        for path, source in sources_in(folder).items()
        if text in source and whole.search(source)
    )


@cache
def sources_in(folder: str) -> dict[Path, str]:
    """Return the Python files in a folder, or the one that is named. Reading all of them takes a tenth of a second."""
    named = ROOT / folder
    return {path.relative_to(ROOT): path.read_text() for path in (named.rglob("*.py") if named.is_dir() else [named])}
