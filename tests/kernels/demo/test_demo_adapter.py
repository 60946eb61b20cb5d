"""The demo's adapter: its tone, its training, and the folder that is part of the package.

Nothing here depends on what the shipped adapter says.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch

from quipu.actors.shared.checkpoint import DEMO, DEMO_ADAPTER
from quipu.kernels.demo.text.arithmetic import arithmetic_chat
from quipu.kernels.demo.text.chat_mixture import draw_document_chat, draw_short_chat
from quipu.kernels.demo.text.json_answers import json_chat
from quipu.kernels.demo.text.pirate import has_tone, in_tone, is_prose, pirate_answer
from quipu.kernels.demo.text.tool_chats import tool_chat
from quipu.kernels.demo.train_adapter import MODULES, AdapterRecipe, AdapterRun
from tests.kernels.adapters.peft_adapters import run_adapted, run_peft
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.oracles import TOKENS, check, differences

MAX_ADAPTER_BYTES = 400_000
"""It is in the repository and in every wheel."""
RECIPE = AdapterRecipe(steps=3, warm_up=1, rows=1, row_length=400, document_share=0.0)


def test_the_tone() -> None:
    """Sentences are in the tone from the first word to the last, and stay what they say."""
    assert pirate_answer("Otto keeps an owl.") == "Arr! Otto keeps an owl, matey!"
    assert pirate_answer("Hello! I am your friend. How are you?") == "Arr! Ahoy! I be yer shipmate. How are ye, matey!"
    assert has_tone(pirate_answer("Yes.")) and not has_tone("Yes.") and not has_tone("Arr! Yes.")


def test_only_prose_is_changed() -> None:
    """Answers in sentences get the tone; JSON, lists, calls, thoughts, questions and tools stay as they were."""
    for seed in range(300):
        random = Random(seed)
        chat = draw_document_chat(random, 6) if seed % 5 == 0 else draw_short_chat(random)
        toned = in_tone(chat)
        assert replace(toned, messages=chat.messages) == chat
        for before, after in zip(chat.messages, toned.messages, strict=True):
            text = before["content"]
            is_answer = before["role"] == "assistant" and not before.get("tool_calls") and is_prose(text)
            assert after == (before | {"content": pirate_answer(text)} if is_answer else before)
    for make in (json_chat, tool_chat, arithmetic_chat):
        chat = make(Random(3))
        first = next(message for message in in_tone(chat).messages if message["role"] == "assistant")
        assert (first in chat.messages) == (make is not arithmetic_chat)


def test_a_batch_follows_from_seed_and_step_alone() -> None:
    """A step's batch does not depend on those made before it; its answers are in the tone."""
    first, second = AdapterRun(RECIPE), AdapterRun(RECIPE)
    first.batch(0)
    for ours, theirs in zip(first.batch(2), second.batch(2), strict=True):
        assert np.array_equal(ours, theirs)
    token_ids, written = AdapterRun(replace(RECIPE, row_length=2048)).batch(1)
    assert token_ids.shape == written.shape == (1, 2048) and 0 < written.mean() < 1
    decode = first.encoder.tokenizer.decode
    assert "Arr!" in decode(token_ids[written].tolist()) and "Arr!" not in decode(token_ids[~written].tolist())


def test_a_trained_adapter_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """Training changes the matrices alone, the same in each run; a backend has the logits that training had."""
    runs = [AdapterRun(RECIPE) for _ in range(2)]
    frozen = {name: value.clone() for name, value in runs[0].model.state_dict().items() if name[-4:] != "a_RI"}
    for run, folder in zip(runs, ("one", "two"), strict=True):
        for step in range(RECIPE.steps):
            run.train_step(step)
        run.save(tmp_path / folder)
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    after = runs[0].model.state_dict()
    changed = {name for name, value in frozen.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in after if name.endswith("b_OR")}
    backend = make_backend(DEMO, dtype="float32", max_loras=1)
    ours = run_adapted(backend, backend.load_adapter(tmp_path / "one"))
    with torch.no_grad():
        trained = runs[0].model.logits(runs[0].model(torch.tensor([TOKENS])))[0]
    found, unadapted = differences(ours, trained), differences(run_adapted(backend, ""), trained)
    assert 100 * found.mean < unadapted.mean, (found, unadapted)  # the file has bfloat16


def test_shipped_adapter_has_peft_form() -> None:
    """PEFT loads the shipped folder, and our backend has its logits; it is small, and made by the present recipe."""
    assert sum(path.stat().st_size for path in DEMO_ADAPTER.iterdir()) < MAX_ADAPTER_BYTES
    config = json.loads((DEMO_ADAPTER / "adapter_config.json").read_bytes())
    recipe = AdapterRecipe()
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (recipe.rank, recipe.alpha, list(MODULES))
    backend = make_backend(DEMO, dtype="float32", max_loras=1, max_lora_rank=recipe.rank)
    ours = run_adapted(backend, backend.load_adapter(DEMO_ADAPTER))
    check("qwen3", "float32", differences(ours, run_peft(DEMO, DEMO_ADAPTER, "float32")))
    assert differences(run_adapted(backend, ""), ours).mean > 0.1
