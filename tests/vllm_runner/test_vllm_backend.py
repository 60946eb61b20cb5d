"""Passes through vLLM's runner on the demo model: the text is the reference's, however it is computed.

Text of the demo model is compared, not bits: vLLM's depend on the batch, and the demo model is certain of its answers.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.backend import Backend
from quipu.kernels.batch import Drawn, Scoring
from quipu.kernels.logit_processors import NONE_LEFT, LogitProcessor, Processing
from quipu.kernels.reference.reference_backend import ReferenceBackend
from quipu.kernels.step_errors import RunnerDiverged
from quipu.kernels.step_types import LogitRules
from quipu.kernels.vllm_runner import vllm_backend
from quipu.kernels.vllm_runner.copied_logits import CopiedLogits
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch, scattered_blocks
from tests.vllm_runner import v2_stand_ins
from tests.vllm_runner.vllm_backends import SIZE, close_all, open_backend, vllm_marks

pytestmark = vllm_marks

NUM_OUTPUTS = 8 if v2_stand_ins.INTERPRETED else 24
VOCAB_SIZE = 3072
NOTES = (
    "Mira lives in Ashford. The river passed the old mill. Otto keeps an owl. Hugo lives in Milton. The wind crossed "
    "the empty fields before the day was over. By the way, Hugo keeps a goat. "
) * 6
QUESTIONS = ("Where does Mira live?", "Which animal does Otto keep?", "Where does Hugo live?", "What does Hugo keep?")


@cache
def prompts() -> list[list[int]]:
    """Return prompts that begin alike, for more than a hundred tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    start = f"Answer questions about this text.\n\nNotes from the village\n\n{NOTES}\n\n"
    return [tokenizer.encode(f"{start}{question}\n").ids for question in QUESTIONS]


@cache
def num_shared() -> int:
    """Return how many whole blocks the prompts share."""
    return next(at for at, tokens in enumerate(zip(*prompts(), strict=False)) if len(set(tokens)) > 1) // SIZE


@cache
def wanted() -> list[list[int]]:
    """Return what the reference says to each prompt."""
    backend = ReferenceBackend(backend_config(DEMO, block_size=SIZE, num_blocks=160))
    return [generate(backend, prompt, tables(1, seed=at)[0])[0] for at, prompt in enumerate(prompts())]


RANKS = {"one rank": 1, "two ranks": 2}


@pytest.fixture(scope="module", params=list(RANKS.values()), ids=list(RANKS))
def backend(request: pytest.FixtureRequest) -> VllmBackend:
    return open_backend(DEMO, tensor_parallel_size=request.param)


def spoil(backend: VllmBackend) -> None:
    """Fill the whole cache with NaN."""
    blocks = range(1, backend.memory_plan.num_blocks)
    host = backend.allocate_on_host(len(blocks))
    np.frombuffer(host, np.uint16)[:] = 0x7FC0  # NaN in bfloat16
    backend.write_blocks(blocks, host)


def tables(count: int, *, seed: int) -> list[list[int]]:
    """Return distinct scattered blocks for so many sequences."""
    blocks = scattered_blocks(12 * count, seed=seed)
    return [blocks[12 * at : 12 * (at + 1)] for at in range(count)]


def generate(
    backend: Backend, prompt: list[int], blocks: list[int], *, start: int = 0, chunk: int = 1 << 20, **row: Any
) -> tuple[list[int], list[Drawn]]:
    """Compute a prompt from `start` on, in chunks, then draw; return the outputs, and what each pass drew."""
    row = {"blocks": blocks, "slot": 0, **row}
    passes: list[Drawn] = []
    for begin in range(start, len(prompt), chunk):
        tokens = prompt[begin : begin + chunk]
        ends = begin + len(tokens) == len(prompt)
        passes.append(backend.step(make_batch({**row, "position": begin, "token_ids": tokens, "samples": ends})))
    for position in range(len(prompt), len(prompt) + NUM_OUTPUTS - 1):
        output_position = 1 + position - len(prompt) + row.get("output_position", 0)
        decode = {"position": position, "token_ids": [0], "carried": True, "output_position": output_position}
        passes.append(backend.step(make_batch({**row, **decode})))
    return [drawn.token_ids[0] for drawn in passes if drawn.rows], passes


@pytest.mark.parametrize("chunk", [1 << 20, 48, *([] if v2_stand_ins.INTERPRETED else [1])])
def test_cold(backend: VllmBackend, chunk: int) -> None:
    """In one piece, in chunks that end within blocks, and token by token."""
    chosen = range(len(prompts())) if chunk > 1 else [0]
    for at in chosen:
        assert generate(backend, prompts()[at], tables(1, seed=10 + at)[0], chunk=chunk)[0] == wanted()[at]


def test_warm(backend: VllmBackend) -> None:
    """Behind blocks that another sequence has computed."""
    first, second = tables(2, seed=20)
    generate(backend, prompts()[0], first)
    shared = num_shared()
    assert shared >= 3
    blocks = first[:shared] + second[shared:]
    assert generate(backend, prompts()[1], blocks, start=shared * SIZE)[0] == wanted()[1]


def test_copied_block(backend: VllmBackend) -> None:
    """The last shared block is copied within the pass that goes on from its last token, and then overwritten."""
    first, second = tables(2, seed=21)
    generate(backend, prompts()[0], first)
    last = num_shared() - 1
    rest = {"position": (last + 1) * SIZE - 1, "blocks": first[:last] + second[last:], "slot": 0}
    batch = make_batch({**rest, "token_ids": prompts()[1][(last + 1) * SIZE - 1 :]})
    drawn = backend.step(attrs.evolve(batch, copies=[(first[last], second[last]), (first[last - 1], first[last])]))
    assert drawn.token_ids == wanted()[1][:1]


def test_preempted(backend: VllmBackend) -> None:
    """Computed again in other blocks, its outputs now part of a chunk."""
    first, second = tables(2, seed=22)
    half = wanted()[3][: NUM_OUTPUTS // 2]
    generate(backend, prompts()[3], first)
    rest, _ = generate(backend, prompts()[3] + half, second, chunk=48)
    assert rest[: NUM_OUTPUTS // 2] == wanted()[3][NUM_OUTPUTS // 2 :]


def test_chunks_beside_decodes(backend: VllmBackend) -> None:
    """Rows in any order, which change from pass to pass; a chunk draws nothing before its last."""
    blocks, drawing = tables(4, seed=23), random.Random(1)
    starts = [{"slot": s, "position": 0, "token_ids": prompts()[s], "blocks": blocks[s]} for s in range(3)]
    outputs = {slot: [token_id] for slot, token_id in enumerate(backend.step(make_batch(*starts)).token_ids)}
    late = prompts()[3]
    for begin in range(0, len(late), 40):
        tokens = late[begin : begin + 40]
        ends = begin + len(tokens) == len(late)
        rows = [{"slot": 7, "position": begin, "token_ids": tokens, "blocks": blocks[3], "samples": ends}]
        rows += [
            {"slot": s, "position": len(prompts()[s]) + len(outputs[s]) - 1, "token_ids": [0], "carried": True,
             "blocks": blocks[s]}
            for s in range(3)
        ]  # fmt: skip
        drawing.shuffle(rows)
        drawn = backend.step(make_batch(*rows))
        assert drawn.rows == [row for row in range(4) if rows[row]["slot"] != 7 or ends]
        for row, token_id in zip(drawn.rows, drawn.token_ids, strict=True):
            outputs.setdefault(rows[row]["slot"], []).append(token_id)
    for slot, text in enumerate(wanted()[:3]):
        assert outputs[slot] == text[: len(outputs[slot])]
    assert outputs[7] == wanted()[3][:1]


def test_skipped_passes(backend: VllmBackend) -> None:
    """A sequence that is left out of some passes goes on where it was."""
    first, second = tables(2, seed=24)
    outputs = backend.step(make_batch({"slot": 1, "position": 0, "token_ids": prompts()[0], "blocks": first})).token_ids
    for position in range(len(prompts()[0]), len(prompts()[0]) + 6):
        backend.step(make_batch({"slot": 2, "position": 0, "token_ids": prompts()[1][:40], "blocks": second}))
        go_on = {"slot": 1, "position": position, "token_ids": [0], "carried": True, "blocks": first}
        outputs += backend.step(make_batch(go_on)).token_ids
    assert outputs == wanted()[0][: len(outputs)]


V1_FAILS = ("_model_forward", "_sample", "_bookkeeping_sync")
V2_FAILS = ("add_requests", "prepare_attn", "sample", "postprocess_sampled")


@pytest.mark.parametrize("fails", V2_FAILS if v2_stand_ins.CHOSEN else V1_FAILS)
def test_pass_that_raises(backend: VllmBackend, fails: str) -> None:
    """Wherever it raises: repeated, it draws the same tokens, and so do sequences beside it.

    With several ranks this holds only outside of what they compute together; for the rest see `test_vllm_ranks.py`.
    """
    if vars(backend)["_followers"] and (v2_stand_ins.CHOSEN or fails == "_model_forward"):
        return
    first, second = tables(2, seed=25)
    runner = vars(backend)["_runner"]
    starts = [
        {"slot": s, "position": 0, "token_ids": prompts()[s], "blocks": blocks}
        for s, blocks in ((0, first), (1, second))
    ]
    outputs = [[token_id] for token_id in backend.step(make_batch(*starts)).token_ids]
    for at in range(6):
        both = [
            {"slot": s, "position": len(prompts()[s]) + at, "token_ids": [0], "carried": True, "blocks": blocks}
            for s, blocks in ((0, first), (1, second))
        ]
        if at % 2:
            with mock.patch.object(runner, fails, side_effect=MemoryError("a passing fault")):
                with pytest.raises(MemoryError, match="a passing fault"):
                    backend.step(make_batch(*both))
        for slot, token_id in enumerate(backend.step(make_batch(*both)).token_ids):
            outputs[slot].append(token_id)
    assert outputs == [text[:7] for text in wanted()[:2]]


def test_row_that_no_one_drew_for_is_refused(backend: VllmBackend) -> None:
    """A carried row without a token to carry raises and leaves everything as it was."""
    (blocks,) = tables(1, seed=26)
    with pytest.raises(ValueError, match="slot 6"):
        backend.step(make_batch({"slot": 6, "position": 3, "token_ids": [0], "carried": True, "blocks": blocks}))
    assert generate(backend, prompts()[0], blocks)[0] == wanted()[0]


def test_difference_ends_the_engine(backend: VllmBackend) -> None:
    """If the runner's idea of a request is not ours, nothing is drawn, and no later pass would be trusted."""
    (blocks,) = tables(1, seed=27)
    backend.step(make_batch({"slot": 0, "position": 0, "token_ids": prompts()[0], "blocks": blocks}))
    runner = vars(backend)["_runner"]
    if v2_stand_ins.CHOSEN:
        runner.req_states.last_sampled_tokens += 1
    else:
        runner.input_batch.token_ids_cpu[0, len(prompts()[0])] += 1  # the token that it drew
    with pytest.raises(RunnerDiverged, match="other input tokens"):
        go_on = {"slot": 0, "position": len(prompts()[0]), "token_ids": [0], "carried": True, "blocks": blocks}
        backend.step(make_batch(go_on))
    assert generate(backend, prompts()[0], blocks)[0] == wanted()[0]


@pytest.mark.skipif(not v2_stand_ins.CHOSEN, reason="of runner V1, every difference is tested without vLLM")
@pytest.mark.parametrize(("what", "at"), [("positions", 0), ("last blocks", 9), ("blocks of new requests", 0)])
def test_differences_on_the_device(backend: VllmBackend, what: str, at: int) -> None:
    """Runner V2 keeps positions and tables on the device; a difference is found there, and named by the host."""
    (blocks,) = tables(1, seed=27)
    first = make_batch({"slot": 0, "position": 0, "token_ids": prompts()[0], "blocks": blocks})
    backend.step(first)
    runner = vars(backend)["_runner"]
    states, table = runner.req_states, runner.block_tables.block_tables[0]
    decode = {"slot": 0, "position": len(prompts()[0]), "token_ids": [0], "carried": True, "blocks": blocks}
    index = states.req_id_to_index[max(states.req_id_to_index, key=int)]
    if what == "positions":
        states.num_computed_tokens.gpu[index] -= 1
        with pytest.raises(RunnerDiverged, match="other positions"):
            backend.step(make_batch(decode))
        return
    if what == "last blocks":
        table.gpu[index, (len(prompts()[0])) // SIZE] += 1
        with pytest.raises(RunnerDiverged, match="other last blocks"):
            backend.step(make_batch(decode))
        return
    apply = table.apply_write

    def apply_wrongly() -> None:
        apply()
        table.gpu[:, at] += 1

    with mock.patch.object(table, "apply_write", apply_wrongly), pytest.raises(RunnerDiverged, match=what):
        backend.step(first)


def test_seeds(backend: VllmBackend) -> None:
    """A seed draws the same cold, warm, chunked, and beside others; another seed draws another text."""
    first, second = tables(2, seed=28)
    draws = {"temperature": 1.5, "seed": 5}
    cold, _ = generate(backend, prompts()[0], first, **draws)
    warm, _ = generate(backend, prompts()[0], first[:3] + second[3:], start=3 * SIZE, slot=3, **draws)
    chunked, _ = generate(backend, prompts()[0], second, chunk=48, **draws)
    assert cold == warm == chunked != wanted()[0]
    assert generate(backend, prompts()[0], second, temperature=1.5, seed=6)[0] != cold


def test_threads_are_kept_apart() -> None:
    """The thread that runs the first pass is told, once, with as many threads as compute."""
    close_all()
    backend = open_backend(DEMO)
    row = {"slot": 0, "position": 0, "token_ids": prompts()[0], "blocks": tables(1, seed=32)[0]}
    with mock.patch.object(vllm_backend, "keep_own_threads_apart") as keep:
        for _ in range(2):
            backend.step(make_batch(row))
    assert keep.call_args_list == [mock.call(backend.capabilities.num_threads)]


def test_bans(backend: VllmBackend) -> None:
    """Rows whose rules only ban tokens draw what they would from a copy of their logits; runner V1 makes none."""
    blocks = tables(3, seed=31)
    rows = [{"slot": s, "position": 0, "token_ids": prompts()[s], "blocks": blocks[s]} for s in range(3)]
    batch = make_batch(*rows)
    words = [text[:1] for text in wanted()[:2]]

    def processing() -> Processing:
        return Processing([0, 1], [LogitProcessor(LogitRules(bad_words=(tuple(one),)), [], []) for one in words])

    scored = backend.step(attrs.evolve(batch, scoring=Scoring([0], [0], [], [], []), processing=processing()))
    with mock.patch.object(CopiedLogits, "of", side_effect=AssertionError("logits were copied")):
        banned = backend.step(attrs.evolve(batch, processing=processing()))
        after = backend.step(batch)
    assert banned.token_ids == scored.token_ids
    assert [banned.token_ids[row] != words[row][0] for row in range(2)] == [True, True]
    assert [banned.token_ids[2], *after.token_ids] == [wanted()[2][0], *(text[0] for text in wanted()[:3])]


def mask_of(allowed: set[int]) -> bytes:
    bits = np.zeros(VOCAB_SIZE, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_rules_and_masks(backend: VllmBackend) -> None:
    """They apply to their rows only, and logprobs are of the raw logits, as on the other backends."""
    blocks, allowed = tables(3, seed=29), set(range(300, 340))
    rows = [{"slot": s, "position": 0, "token_ids": prompts()[s], "blocks": blocks[s]} for s in range(3)]
    scoring = Scoring([0, 1, 2], [3, 3, 3], [], [], [])
    plain = backend.step(attrs.evolve(make_batch(*rows), scoring=scoring))
    rules = LogitProcessor(LogitRules(bias={200: 100.0}, frequency_penalty=2.0), prompts()[1], [])
    processing = Processing([1], [rules], [2], lambda: [mask_of(allowed)])
    drawn = backend.step(attrs.evolve(make_batch(*rows), scoring=scoring, processing=processing))
    assert plain.token_ids == [text[0] for text in wanted()[:3]]
    assert drawn.token_ids[:2] == [plain.token_ids[0], 200] and drawn.token_ids[2] in allowed
    assert plain.scores is not None and drawn.scores is not None
    assert drawn.scores.top_ids == plain.scores.top_ids and drawn.scores.top_logprobs == plain.scores.top_logprobs
    assert drawn.scores.ranks[0] == 1 < drawn.scores.ranks[1]
    # the next pass is fed what the rules drew
    after = [{**row, "position": len(row["token_ids"]), "token_ids": [0], "carried": True} for row in rows]
    fed = [
        {**row, "token_ids": [token_id], "carried": False} for row, token_id in zip(after, drawn.token_ids, strict=True)
    ]
    assert backend.step(make_batch(*after)).token_ids == backend.step(make_batch(*fed)).token_ids


def test_mask_without_a_token(backend: VllmBackend) -> None:
    """It fails its row alone."""
    blocks = tables(2, seed=30)
    rows = [{"slot": s, "position": 0, "token_ids": prompts()[s], "blocks": blocks[s]} for s in range(2)]
    processing = Processing([], [], [0], lambda: [mask_of(set())])
    drawn = backend.step(attrs.evolve(make_batch(*rows), processing=processing))
    assert processing.failures == {0: NONE_LEFT} and drawn.broken_rows == []
    assert drawn.token_ids[1] == wanted()[1][0]


def test_prompt_scores(backend: VllmBackend) -> None:
    """Scores of a prompt's tokens and of the first output are near the reference's, whatever the row's place."""
    blocks = tables(2, seed=31)
    prompt = prompts()[2]
    rows = [
        {"slot": 4, "position": 0, "token_ids": prompts()[0][:50], "blocks": blocks[0]},
        {"slot": 0, "position": 0, "token_ids": prompt, "blocks": blocks[1]},
    ]
    at = range(50, 50 + len(prompt) - 1)
    scoring = Scoring([1], [2], list(at), prompt[1:], [2] * len(at))
    batch = attrs.evolve(make_batch(*rows), scoring=scoring)
    theirs = ReferenceBackend(backend_config(DEMO, block_size=SIZE, num_blocks=160)).step(batch)
    # the runner has the second row first if it knows a request there already
    for _ in range(2):
        ours = backend.step(batch)
        assert ours.prompt_scores is not None and theirs.prompt_scores is not None
        assert ours.prompt_scores.token_ids == prompt[1:] and len(ours.prompt_scores.top_ids[0]) == 2
        difference = np.abs(np.subtract(ours.prompt_scores.logprobs, theirs.prompt_scores.logprobs))
        assert np.median(difference) < 0.02 and np.quantile(difference, 0.9) < 0.2
        assert ours.scores is not None and ours.scores.token_ids == [wanted()[2][0]]
        backend.step(make_batch({**rows[1], "token_ids": prompt[:3]}))


def test_broken_row(backend: VllmBackend) -> None:
    """NaN in one sequence's KV breaks its row alone, and nothing of it is left for who gets its blocks next."""
    first, second = tables(2, seed=32)
    for slot, blocks in ((0, first), (1, second)):
        backend.step(make_batch({"slot": slot, "position": 0, "token_ids": prompts()[slot], "blocks": blocks}))
    host = backend.allocate_on_host(len(first))
    np.frombuffer(host, np.uint16)[:] = 0x7FC0  # NaN in bfloat16
    backend.write_blocks(first, host)
    both = [
        {"slot": s, "position": len(prompts()[s]), "token_ids": [0], "carried": True, "blocks": blocks}
        for s, blocks in ((0, first), (1, second))
    ]
    drawn = backend.step(make_batch(*both))
    assert drawn.broken_rows == [0] and drawn.token_ids[1] == wanted()[1][1]
    assert generate(backend, prompts()[0], first)[0] == wanted()[0]


def test_unwritten_slots_are_never_read(backend: VllmBackend) -> None:
    """A sequence in blocks full of NaN says what it says in others."""
    (blocks,) = tables(1, seed=33)
    spoil(backend)
    assert generate(backend, prompts()[0], blocks, chunk=48)[0] == wanted()[0]


def test_blocks_by_way_of_the_host(backend: VllmBackend) -> None:
    """What is read from blocks and written to others is as good as computed there; other sizes are refused."""
    first, second = tables(2, seed=34)
    generate(backend, prompts()[0], first)
    shared = num_shared()
    host = backend.allocate_on_host(shared)
    backend.read_blocks(first[:shared], host)
    spoil(backend)
    backend.write_blocks(second[:shared], host)
    assert generate(backend, prompts()[1], second, start=shared * SIZE)[0] == wanted()[1]
    for blocks in ([], [1] * (shared + 1)):
        with pytest.raises(ValueError, match="blocks of"):
            backend.read_blocks(blocks, host)


def test_end_of_the_context(backend: VllmBackend) -> None:
    """A prompt may be as long as the context, where nothing is drawn; one token shorter, one is."""
    length = backend.memory_plan.max_model_len
    blocks = scattered_blocks(-(-length // SIZE), seed=35)
    tokens = (prompts()[0] * 8)[:length]
    whole = make_batch({"position": 0, "token_ids": tokens, "blocks": blocks, "samples": False})
    assert backend.step(whole) == Drawn([], [])
    shorter = make_batch({"position": length - 2, "token_ids": tokens[length - 2 : -1], "blocks": blocks})
    assert len(backend.step(shorter).token_ids) == 1


def test_capabilities(backend: VllmBackend) -> None:
    """What the server says of it: not invariant, and with vLLM's version in what determines its numbers."""
    found = backend.capabilities
    assert (found.name, found.determinism, found.dtype, found.weights) == ("vllm", "fast", "bfloat16", "bfloat16")
    assert found.runs_beside_host == (found.library is not None and " V2" in found.library)
    assert found.library is not None and found.library.startswith("vllm 0.32.") and " eager" in found.library
    assert backend.memory_plan.num_blocks == 160 and backend.memory_plan.block_bytes == backend.blocks.num_bytes


def test_weights(backend: VllmBackend) -> None:
    """The plan has the bytes of all weights, packed ones included; every rank has the small ones."""
    with safe_open(DEMO / "model.safetensors", "pt") as stored:
        num_bytes = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118 - it is no dictionary
    assert num_bytes <= backend.memory_plan.weights_bytes < 1.01 * num_bytes


@pytest.mark.skipif(v2_stand_ins.INTERPRETED, reason="torch's compiler does not know the stand-ins for a GPU")
def test_compiled() -> None:
    """A compiled model says the same: whole prompts, prompts in chunks, and several sequences in a pass."""
    backend = open_backend(DEMO, enforce_eager=False)
    for at, blocks in enumerate(tables(2, seed=70)):
        assert generate(backend, prompts()[at], blocks, chunk=(1 << 20, 48)[at])[0] == wanted()[at]
    rows = [
        {"slot": at, "token_ids": prompt, "position": 0, "blocks": blocks}
        for at, (prompt, blocks) in enumerate(zip(prompts()[:3], tables(3, seed=71), strict=True))
    ]
    assert backend.step(make_batch(*rows)).token_ids == [output[0] for output in wanted()[:3]]


@pytest.mark.skipif(v2_stand_ins.INTERPRETED, reason="torch's compiler does not know the stand-ins for a GPU")
def test_compiler_that_fails() -> None:
    """A model that cannot be compiled is refused with the flag that helps, and what the compiler says."""
    runner = "vllm.v1.worker.cpu_model_runner.CPUModelRunner.warming_up_model"
    close_all()
    with (
        mock.patch(runner, side_effect=RuntimeError("No working C++ compiler found")),
        pytest.raises(ValueError, match=r"--enforce-eager runs it without .*No working C\+\+ compiler found"),
    ):
        open_backend(DEMO, enforce_eager=False)
