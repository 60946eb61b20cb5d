"""Training of the demo model: what is learnt, and that a stopped run continues as if it had not stopped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from quipu.kernels.demo import probes
from quipu.kernels.demo.chat_encoder import CHECKPOINT, ChatEncoder
from quipu.kernels.demo.copying import repeated_facts
from quipu.kernels.demo.probes import measure
from quipu.kernels.demo.text.chat_mixture import draw_document_chat, draw_short_chat
from quipu.kernels.demo.train import BatchMaker, Recipe, Run, loss_of
from quipu.kernels.demo.transformer import Attention, Layer, Shape, Transformer, rotate, rotation

SMALL = Shape(3072, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
RECIPE = Recipe(
    seed=3, steps=6, tokens_per_step=768, warm_up=2, copying_steps=1, looking_steps=2, short_steps=3, growing_steps=4,
    shape=SMALL,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder()


def test_written_tokens_are_the_assistants(encoder: ChatEncoder) -> None:
    """What the model has to write is each assistant message with its thoughts and its end, and nothing else."""
    end = encoder.token_id("<|im_end|>")
    for seed in range(200):
        random = Random(seed)
        chat = draw_document_chat(random, 5) if seed % 4 == 0 else draw_short_chat(random)
        ids, written = encoder.encode(chat)
        text = encoder.tokenizer.decode(ids[written], skip_special_tokens=False)
        expected = re.findall(
            r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", encoder.render(chat), re.S
        )
        assert text == "".join(expected)
        assert (ids[written] == end).sum() == sum(message["role"] == "assistant" for message in chat.messages)


def test_template_is_append_only(encoder: ChatEncoder) -> None:
    """Without thinking, a chat's prompt begins with the previous turn's prompt and answer: all of it can be cached."""
    for seed in range(100):
        chat = draw_short_chat(Random(seed))
        if chat.thinking:
            continue
        whole = encoder.render(chat)
        for place, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                chat_before = type(chat)(chat.kind, chat.messages[:place], chat.tools)
                prompt = encoder.render(chat_before, add_generation_prompt=True)
                assert whole.startswith(prompt + message["content"])


def test_template_as_in_transformers(encoder: ChatEncoder) -> None:
    """transformers renders and encodes the same, with tools, calls and thoughts."""
    reference = AutoTokenizer.from_pretrained(CHECKPOINT)
    for seed in range(100):
        chat = draw_short_chat(Random(seed))
        expected = reference.apply_chat_template(
            chat.messages, tools=chat.tools or None, enable_thinking=chat.thinking, tokenize=False
        )
        assert encoder.render(chat) == expected
        assert encoder.encode(chat)[0].tolist() == reference.encode(expected, add_special_tokens=False)


def test_batches_depend_on_seed_and_step_alone() -> None:
    """A step's batch does not depend on those made before it; other seeds and steps have other batches."""
    first, second = BatchMaker(RECIPE), BatchMaker(RECIPE)
    first.make(0)
    assert np.array_equal(first.make(4).token_ids, second.make(4).token_ids)
    assert np.array_equal(first.make(4).weights, second.make(4).weights)
    assert not np.array_equal(first.make(3).token_ids, first.make(4).token_ids)
    other = BatchMaker(replace(RECIPE, seed=4))
    assert not np.array_equal(first.make(4).token_ids, other.make(4).token_ids)


def test_rows_grow() -> None:
    """Rows grow from 128 to 2,048 tokens, repetition ends, and the learning rate falls to nearly zero."""
    recipe = Recipe()
    lengths = [recipe.row_length(step) for step in range(recipe.steps)]
    assert lengths == sorted(lengths) and lengths[0] == 128 and lengths[-1] == 2048
    assert {384, 1024} <= set(lengths)
    assert recipe.repetition(recipe.looking_steps) > 0 == recipe.repetition(recipe.repetition_steps)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[0] < rates[recipe.warm_up] == 1.0 == rates[recipe.first_cooler_step] > rates[-1] > 0
    assert rates[-1] < 0.001 and rates[recipe.first_cooler_step :] == sorted(
        rates[recipe.first_cooler_step :], reverse=True
    )


def test_first_rows_only_repeat() -> None:
    """In the first steps a row repeats a few random tokens, and what has been seen before is to be predicted."""
    batch = BatchMaker(RECIPE).make(0)
    for token_ids, weights in zip(batch.token_ids, batch.weights, strict=True):
        period = int((weights == 0).sum())
        assert 4 <= period <= 128 // 3 and len(token_ids) == 128
        assert np.array_equal(token_ids[period:], token_ids[:-period])
        assert np.array_equal(weights, np.arange(128) >= period)


def test_random_facts() -> None:
    """Later rows state random facts twice, in two orders: each value of the second time can be looked up."""
    for seed in range(200):
        token_ids, weights = repeated_facts(np.random.default_rng(seed), 128, 3072)
        (places,) = weights.nonzero()
        assert len(token_ids) == len(weights) == 128 and len(places) >= 4
        starts = [int(start) for start in places[:-1] + 1]
        for start, place in zip(starts, places[1:], strict=True):
            fact = token_ids[start : place + 1]
            before = np.lib.stride_tricks.sliding_window_view(token_ids[:start], len(fact))
            assert (before == fact).all(1).any()
            assert (before[:, :-1] == fact[:-1]).all(1).sum() == 1, "who and what must tell the value"


def test_first_layer_looks_back() -> None:
    """At first, head h of the first layer looks at the token h + 1 before."""
    torch.manual_seed(0)
    model = Transformer(Shape(3072))
    token_ids = torch.randint(3072, (1, 40))
    layer = model.layers[0]
    assert isinstance(layer, Layer) and isinstance(layer.self_attn, Attention)
    attention, x = layer.self_attn, layer.input_layernorm(model.embed_tokens(token_ids))
    cos, sin = rotation(40, model.shape, CPU)
    heads = [
        rotate(norm(project(x).view(1, 40, -1, 64)).transpose(1, 2), cos, sin)
        for norm, project in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
    ]
    scores = heads[0] @ heads[1].repeat_interleave(2, 1).transpose(-1, -2) / 8
    looks = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[0]
    for head in range(4):
        assert looks[head].diagonal(-head - 1).mean() > 0.8


def test_loss_counts_weighted_tokens() -> None:
    """Tokens without a weight do not change the loss; those that the model has to write are reported alone."""
    torch.manual_seed(0)
    model = Transformer(SMALL)
    torch.nn.init.normal_(model.embed_tokens.weight, std=0.3)
    batch = BatchMaker(RECIPE).make(5)
    loss, written_loss = loss_of(model, batch, CPU)
    logits = model.logits(model(torch.from_numpy(batch.token_ids)))[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.from_numpy(batch.token_ids)[:, 1:], reduction="none"
    )
    weights = torch.from_numpy(batch.weights)[:, 1:]
    assert loss.item() == pytest.approx(((losses * weights).sum() / weights.sum()).item(), rel=0.01)
    assert written_loss.item() == pytest.approx(losses[weights == 1].mean().item(), rel=0.01)
    assert 0 < (weights == 1).float().mean() < 0.9 and (weights == 0).any() and ((weights > 0) & (weights < 1)).any()


def test_stopped_run_goes_on(tmp_path: Path) -> None:
    """A run that was stopped after two steps ends with the same weights as one that was not, bit for bit."""
    whole = Run(tmp_path / "whole", RECIPE)
    whole.train(10, probe_every=0)
    for end in (2, RECIPE.steps):
        run = Run(tmp_path / "parts", RECIPE)
        while run.step < end:
            run.train_step(run.batches.make(run.step))
        run.save()
    left = load_file(tmp_path / "whole" / "checkpoint" / "model.safetensors")
    right = load_file(tmp_path / "parts" / "checkpoint" / "model.safetensors")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert run.step == 6 and json.loads((tmp_path / "whole" / "log.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_other_recipe_is_refused(tmp_path: Path) -> None:
    """A folder's run continues only with its own recipe."""
    Run(tmp_path, RECIPE).save()
    with pytest.raises(SystemExit, match="another recipe"):
        Run(tmp_path, replace(RECIPE, seed=5))


def test_number_of_steps_may_change_before_cool_down(tmp_path: Path) -> None:
    """A run may be made longer as long as its learning rate has not begun to fall, and no longer."""
    run = Run(tmp_path, RECIPE)
    while run.step < RECIPE.first_cooler_step:
        run.train_step(run.batches.make(run.step))
    run.save()
    longer = Run(tmp_path, replace(RECIPE, steps=8))
    assert longer.step == RECIPE.first_cooler_step < longer.recipe.first_cooler_step
    run.train_step(run.batches.make(run.step))
    run.save()
    with pytest.raises(SystemExit, match="another recipe"):
        Run(tmp_path, replace(RECIPE, steps=8))


def test_probes_count_right_answers(encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always writes the right token has every answer right; an untrained one has none."""
    monkeypatch.setattr(probes, "PROBES", {name: (make, 1) for name, (make, _) in probes.PROBES.items()})
    torch.manual_seed(0)
    shares = measure(Transformer(SMALL), encoder, CPU)
    assert set(shares.values()) == {0.0}

    class Oracle(Transformer):
        def forward(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
            return token_ids_BT

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(hidden.roll(-1, -1), SMALL.vocab_size).float()

    assert set(measure(Oracle(SMALL), encoder, CPU).values()) == {1.0}
