"""`quipu serve --executor transformers`: counts, texts, preemption."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StableLmConfig

from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.servers import serving
from tests.tiny import TINY

CONFIG = StableLmConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=2,
)
NUM_BLOCKS = 25
PROMPTS = [token_prompt(f"foreign {index}", 80 + 7 * index) for index in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with `TINY`'s tokenizer, and weights whose greedy tokens lead by more than rounding changes."""
    folder = tmp_path_factory.mktemp("checkpoints") / "foreign"
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[str]:
    """Return the texts that transformers generates."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            suppress_tokens=[2], pad_token_id=0,
        )  # fmt: skip
        texts.append(str(tokenizer.decode(ids[0][len(prompt) :], skip_special_tokens=True)))
    return texts


def test_served(model: Path, tmp_path: Path) -> None:
    """Completions have transformers' texts, also when preempted; chats and messages say what was cached, exactly."""
    expected = greedy(model, PROMPTS, 60)
    flags = ("--executor", "transformers", "--num-blocks", str(NUM_BLOCKS), "--threads", "1")
    with serving(tmp_path / "here", str(model), *flags) as server, ThreadPoolExecutor(len(PROMPTS)) as pool:
        fields = {"model": "foreign", "ignore_eos": True, "logit_bias": {"2": -100}}
        answers = list(pool.map(lambda prompt: server.complete(prompt, 60, **fields).json(), PROMPTS))
        assert [answer["choices"][0]["text"] for answer in answers] == expected
        metrics = server.wait_at_rest()
        assert metrics["num_preemptions_total"] > 0 and metrics["recomputed_tokens_total"] > 0

        chat = {"model": "foreign", "messages": [{"role": "user", "content": text_prompt("foreign", 60)}]}
        chat |= {"temperature": 0.8, "seed": 5, "max_tokens": 20, "logprobs": True}
        first, second = (server.post("/v1/chat/completions", chat).json() for _ in range(2))
        assert first["choices"] == second["choices"]
        num_prompt = first["usage"]["prompt_tokens"]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
        assert cached == [0, (num_prompt - 1) // 16 * 16] and num_prompt > 40

        message = {"model": "foreign", "messages": chat["messages"], "max_tokens": 5}
        usage = server.post("/v1/messages", message).json()["usage"]
        assert usage["cache_read_input_tokens"] == cached[1]
        assert usage["input_tokens"] + cached[1] + usage["cache_creation_input_tokens"] == num_prompt
        info, metrics = server.get("/server_info").json()["engine"], server.wait_at_rest()
    assert (info["backend"], info["determinism"]) == ("transformers", "fast")
    assert info["library"].startswith("transformers 5.") and metrics["usage_disputed_total"] == 0
