"""Adapters made by PEFT, on real servers: from the start and loaded later, on engines that compute."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_list import list_engines
from tests.e2e.servers import Server, run_quipu, serving
from tests.kernels.adapters.peft_adapters import make_adapter
from tests.processes import eventually
from tests.tiny import TINY

PROMPT = list(range(300, 350))


def ask(server: Server, model: str) -> Any:
    """Return the logprobs of a completion, which differ wherever logits do."""
    answer = server.complete(PROMPT, 4, model=model, temperature=0, logprobs=1)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def cached(server: Server, model: str) -> int:
    answer = server.complete(PROMPT, 4, model=model, temperature=0).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_served(tmp_path: Path) -> None:
    """Each adapter answers as itself on every engine, restarted ones included, and the model as if there were none."""
    folders = tmp_path / "adapters"
    for name, rank in (("first", 4), ("second", 8)):
        make_adapter(folders / name, TINY, r=rank, target_modules=["q_proj", "v_proj", "down_proj"])
    with serving(tmp_path / "plain", "--executor", "auto") as server:
        plain = ask(server, "demo")
    flags = ["--executor", "auto", "--engines", "2", "--lora-modules", f"first={folders / 'first'}"]
    with serving(tmp_path / "adapted", *flags, "--lora-dir", str(folders), "--max-loras", "2") as server:
        first = ask(server, "first")
        assert ask(server, "demo") == plain != first
        assert cached(server, "first") == 48
        body = {"lora_name": "second", "lora_path": "second"}
        assert server.post("/v1/load_lora_adapter", body).text.startswith("Success")
        second = ask(server, "second")
        assert len({tuple(answer) for answer in (plain, first, second)}) == 3
        names = {entry["id"]: entry["parent"] for entry in server.get("/v1/models").json()["data"]}
        assert names == {"demo": None, "first": "demo", "second": "demo"}
        for pid in server.engines():
            os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: [(its["state"], its["deaths"]) for its in list_engines(server)] == [("ready", 1)] * 2,
            "others have replaced them",
        )
        assert [ask(server, name) for name in ("demo", "first", "second")] == [plain, first, second]
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "first"}).text.startswith("Success")
        assert server.complete(PROMPT, 4, model="first").status_code == 404
        assert ask(server, "second") == second


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-modules", "first=nowhere"], "no adapter_config.json"),
        (["--lora-modules", "first"], "NAME=FOLDER"),
        (["--lora-modules", "demo=x"], "the model itself"),
        (["--lora-modules", "a=x", "a=y"], "twice"),
        (["--lora-modules", "a=x", "b=y", "--max-loras", "1"], "--max-loras is 1"),
        (["--max-loras", "3"], "--max-loras needs --enable-lora"),
        (["--max-lora-rank", "3"], "--max-lora-rank needs --enable-lora"),
        (["--lora-dir", "."], "--lora-dir needs --enable-lora"),
        (["--enable-lora", "--lora-dir", "nowhere"], "is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_flags(tmp_path: Path, flags: list[str], said: str) -> None:
    """End with a line that says what is wrong."""
    server = ("serve", str(TINY), "--served-model-name", "demo", "--executor", "fake", "--port", "0")
    done = run_quipu(*server, *flags, folder=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
