"""Token ids of text completions, as trainers of agents read them to know exactly what the model saw and wrote."""

from __future__ import annotations

from typing import Any

from tests.tools.scripted_model import ScriptedModel, scripted_model

COMPLETIONS = "/v1/completions"


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "return_token_ids": True, **fields}


async def streamed(model: ScriptedModel, **fields: Any) -> dict[int, dict[str, Any]]:
    """Return prompt ids, output ids and text of each choice, joined."""
    answer = await model.send(COMPLETIONS, request(stream=True, **fields))
    joined: dict[int, dict[str, Any]] = {}
    for chunk in model.events_of(answer):
        (choice,) = chunk["choices"]
        one = joined.setdefault(choice["index"], {"prompt_token_ids": None, "token_ids": [], "text": ""})
        if "prompt_token_ids" in choice:
            assert one["prompt_token_ids"] is None and not one["token_ids"]
            one["prompt_token_ids"] = choice["prompt_token_ids"]
        one["token_ids"] += choice.get("token_ids", [])
        one["text"] += choice["text"]
    return joined


async def test_ids_of_each_prompt_and_choice() -> None:
    """Each choice has the ids of its prompt, once, and of its output, the end included, streamed or not."""
    async with scripted_model("Hi!") as model:
        written = [*model.tokens("Hi!"), model.end]
        for echo in (False, True):
            whole = (await model.send(COMPLETIONS, request(n=2, echo=echo))).json()["choices"]
            assert [choice["prompt_token_ids"] for choice in whole] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
            assert [choice["token_ids"] for choice in whole] == [written] * 4
            parts = await streamed(model, n=2, echo=echo)
            names = ("prompt_token_ids", "token_ids", "text")
            assert [parts[choice["index"]] for choice in whole] == [{n: choice[n] for n in names} for choice in whole]
        plain = (await model.send(COMPLETIONS, request(return_token_ids=False))).json()["choices"]
        assert not {"prompt_token_ids", "token_ids"} & plain[0].keys()
