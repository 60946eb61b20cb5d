"""`quipu serve --executor vllm`, with OpenAI's client."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.e2e.prompts import token_prompt
from tests.e2e.servers import run_quipu, serving
from tests.vllm_runner.vllm_backends import LONGEST_S, SERVE_DEMO, vllm_marks

pytestmark = vllm_marks

FLAGS = (*SERVE_DEMO, "--num-blocks", "300", "--max-model-len", "4096")
NOTES = "Mira lives in Ashford. The river passed the old mill. Otto keeps an owl. Hugo lives in Milton. " * 8


def test_chat(tmp_path: Path) -> None:
    """A chat is answered; the same one again is cached up to its last whole block, streamed or not."""
    question = f"Answer questions about this text.\n\n{NOTES}\n\nWhere does Hugo live?"
    fields = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 30}
    with serving(tmp_path, *FLAGS, ready_s=LONGEST_S) as server, closing(server.client()) as client:
        first = client.chat.completions.create(**fields)
        second = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        info = server.get("/server_info").json()
        metrics = server.wait_at_rest()
        assert not server.events("engine.died"), "the first engine is the one that serves"
    usage = first.usage, second.usage, chunks[-1].usage
    assert [u.prompt_tokens_details.cached_tokens for u in usage] == [0, *[usage[0].prompt_tokens // 32 * 32] * 2]
    assert "Milton" in first.choices[0].message.content
    assert second.choices[0].message.content == first.choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == first.choices[0].message.content
    assert (info["engine"]["backend"], info["engine"]["determinism"]) == ("vllm", "fast")
    assert info["engine"]["library"].startswith("vllm 0.32.")
    assert metrics["usage_disputed_total"] == 0


HANGS_ONCE = """
import os, sys, threading, time

def hang_once():
    while not hasattr(module := sys.modules.get("vllm.v1.worker.gpu_model_runner"), "GPUModelRunner"):
        time.sleep(0.05)
    runner = module.GPUModelRunner
    forward = runner._model_forward

    def run(*arguments, **named):
        if os.path.exists(os.environ["HANG"]):
            os.unlink(os.environ["HANG"])
            time.sleep(3600)
        return forward(*arguments, **named)

    runner._model_forward = run

if any("engine_process" in each for each in sys.orig_argv):
    threading.Thread(target=hang_once, daemon=True).start()
"""
"""A `sitecustomize` with which one pass of vLLM's, the next one once the file HANG is there, never ends."""


def test_pass_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in whose pass vLLM hangs is killed after `--step-timeout`; its request goes on with the next one."""
    (tmp_path / "sitecustomize.py").write_text(HANGS_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HANG", str(hang := tmp_path / "hang"))
    flags = ("--executor", "vllm", "--dtype", "float32", "--block-size", "32", "--num-blocks", "200", "--enforce-eager")
    with serving(tmp_path / "server", *flags, "--step-timeout", "6", ready_s=LONGEST_S) as server:
        first, prompt = server.engine_pid(), token_prompt("hangs", 70)
        request = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        wanted = server.post("/v1/completions", request).json()
        hang.touch()
        found = httpx.post(f"{server.url}/v1/completions", json=request, timeout=LONGEST_S).json()
        (died,) = server.events("engine.died")
        metrics = server.wait_at_rest()
        assert server.engine_pid() != first and not hang.exists()
    assert "took longer than 6 seconds (--step-timeout)" in died["reason"]
    assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing was admitted before the hang"
    assert metrics["usage_disputed_total"] == metrics['requests_total{outcome="failed"}'] == 0


def test_block_size_is_refused(tmp_path: Path) -> None:
    """A size that the attention does not take is refused with the flag that helps."""
    done = run_quipu("serve", *FLAGS, "--block-size", "16", "--port", "0", folder=tmp_path, timeout_s=LONGEST_S)
    assert done.returncode != 0
    assert "takes multiples of 32: add --block-size 32" in done.stderr
