"""`quipu serve --executor vllm`, with OpenAI's client."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from quipu.actors.shared.checkpoint import DEMO
from tests.e2e.servers import run_quipu, serving
from tests.vllm_runner.vllm_backends import vllm_marks

pytestmark = vllm_marks

FLAGS = (
    str(DEMO),
    "--served-model-name",
    "demo",
    "--executor",
    "vllm",
    "--enforce-eager",
    "--num-blocks",
    "300",
    "--max-model-len",
    "4096",
)
NOTES = "Mira lives in Ashford. The river passed the old mill. Otto keeps an owl. Hugo lives in Milton. " * 8


def test_chat(tmp_path: Path) -> None:
    """A chat is answered; the same one again is cached up to its last whole block, streamed or not."""
    question = f"Answer questions about this text.\n\n{NOTES}\n\nWhere does Hugo live?"
    fields = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 30}
    with serving(tmp_path, *FLAGS, "--block-size", "32", ready_s=200) as server, closing(server.client()) as client:
        first = client.chat.completions.create(**fields)
        second = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        info = server.get("/server_info").json()
        metrics = server.wait_at_rest()
    usage = first.usage, second.usage, chunks[-1].usage
    assert [u.prompt_tokens_details.cached_tokens for u in usage] == [0, *[usage[0].prompt_tokens // 32 * 32] * 2]
    assert "Milton" in first.choices[0].message.content
    assert second.choices[0].message.content == first.choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == first.choices[0].message.content
    assert (info["engine"]["backend"], info["engine"]["determinism"]) == ("vllm", "fast")
    assert info["engine"]["library"].startswith("vllm 0.32.")
    assert metrics["usage_disputed_total"] == 0


def test_block_size_is_refused(tmp_path: Path) -> None:
    """The default size of 16 is refused with the flag that helps."""
    done = run_quipu("serve", *FLAGS, "--port", "0", folder=tmp_path, timeout_s=200)
    assert done.returncode != 0
    assert "takes multiples of 32: add --block-size 32" in done.stderr
