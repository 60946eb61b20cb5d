"""Images that no step may divide, on engines that share a prompt, keep it on the host, draft, and score it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.e2e.engine_list import engine_samples, wait_all_ready
from tests.e2e.ledger_command import ledger
from tests.e2e.servers import Server, eventually, serving
from tests.kernels.transformers_runner.seeing_models import NUM_TOKENS, draw_image, pixel_values, told_of_images
from tests.seeing import (
    PLACEHOLDER,
    Checkpoint,
    chat_body,
    counts,
    drawn_url,
    greedy,
    make_seeing_checkpoint,
    prompt_of,
    said,
    seen,
)

TEXT = "Look closely at what is shown here. "
FIELDS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logit_bias": {"2": -100}}
ROOM = ("--executor", "transformers", "--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoints") / "seeing"
    return Checkpoint(make_seeing_checkpoint(folder, "gemma3"), "gemma3")


def ask(server: Server, *seeds: int, **fields: Any) -> dict[str, Any]:
    """Ask about images that follow one another."""
    body = chat_body(said(TEXT), *[seen(drawn_url(seed)) for seed in seeds], **FIELDS, **fields)
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(model: Checkpoint, *seeds: int) -> str:
    return greedy(model, prompt_of(model, TEXT, *[""] * len(seeds)), *seeds)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_engines_apart(model: Checkpoint, tmp_path: Path) -> None:
    """One engine computes a prompt with images, another continues it, with the text that transformers generates, and
    the books agree."""
    apart = ("--engines", "prefill:1,decode:1", "--prefill-local-tokens", "0", "--num-blocks", "60")
    with serving(tmp_path, str(model.folder), *ROOM, str(NUM_TOKENS + 4), *apart) as server:
        wait_all_ready(server, 2)
        first, again = ask(server, 1, 2), ask(server, 1, 2)
        assert text_of(first) == text_of(again) == expected(model, 1, 2)
        num_prompt, cached, image_tokens = counts(again)
        assert (cached, image_tokens) == ((num_prompt - 1) // 16 * 16, 2 * NUM_TOKENS)
        assert text_of(ask(server, 1, 3)) == expected(model, 1, 3)
        assert server.wait_at_rest()["usage_disputed_total"] == 0
        steps = {engine: its["engine_steps_total"] for engine, its in engine_samples(server).items() if engine}
        assert min(steps.values()) > 0
    (account,) = json.loads(ledger(tmp_path, "reconcile", "--json").stdout)
    assert account["agrees"]


def test_host_tier_and_drafts(model: Checkpoint, tmp_path: Path) -> None:
    """A prompt with images comes back from the host, and drafts are accepted behind it: transformers' text."""
    tier = ("--num-blocks", "22", "--kv-host-memory", "16MiB", "--kv-load", "always")
    drafts = ("--speculative", "suffix", "--speculative-costs", "1:10,16:12,64:20")
    with serving(tmp_path, str(model.folder), *ROOM, str(NUM_TOKENS + 70), *tier, *drafts) as server:
        first = ask(server, 1, 2)
        for seed in range(10, 18):
            ask(server, seed, seed + 1)
        eventually(lambda: server.metrics()['kv_tier_stored_blocks_total{tier="host"}'] > 10, "blocks on the host")
        again = ask(server, 1, 2)
        assert text_of(first) == text_of(again) == expected(model, 1, 2)
        assert counts(again)[1] == (counts(again)[0] - 1) // 16 * 16
        metrics = server.wait_at_rest()
        assert metrics['kv_tier_loaded_blocks_total{tier="host"}'] > 0
        assert metrics["spec_decode_num_draft_tokens_total"] > 0
        assert metrics["usage_disputed_total"] == 0


@torch.inference_mode()
def test_scores_of_the_prompt(model: Checkpoint, tmp_path: Path) -> None:
    """The logprobs of a prompt's tokens are transformers', within images, too."""
    tokens = prompt_of(model, TEXT, "", "")
    theirs = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.float32)
    logits = theirs(
        torch.tensor([tokens]),
        pixel_values=torch.cat([pixel_values(draw_image(seed)) for seed in (1, 2)]),
        **told_of_images(model.family, tokens, PLACEHOLDER),
    ).logits[0]
    wanted = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
    with serving(tmp_path, str(model.folder), *ROOM, str(NUM_TOKENS + 4), "--num-blocks", "60") as server:
        answer = ask(server, 1, 2, prompt_logprobs=0)
    scores = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    ours = [scored[str(token)]["logprob"] for scored, token in zip(scores[1:], tokens[1:], strict=True)]
    assert float((torch.tensor(ours) - wanted).abs().max()) < 1e-3
