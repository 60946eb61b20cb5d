"""`LLM`: requests in order, usage as the ledger has it, errors that name the field, and nothing left after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from quipu import LLM, EngineError, RequestError, SamplingParams
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.reconciling import reconcile
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.wiring import Runtime
from quipu.web.library.engine_thread import EngineThread
from quipu.web.library.model_settings import resolve_settings
from tests.e2e.servers import eventually
from tests.processes import PATIENCE_S
from tests.web.library.library_metrics import held_in

GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def llm(data_dir: Path) -> Iterator[LLM]:
    with LLM("demo", executor="fake", data_dir=str(data_dir), served_model_name=["knots", "demo"]) as opened:
        yield opened


def test_import_is_light() -> None:
    """`import quipu` loads neither torch nor trio, and names what there is; `from quipu import LLM` loads no torch."""
    code = (
        "import sys, quipu; print({'torch', 'trio', 'quart'} & sys.modules.keys(), 'LLM' in dir(quipu));"
        "from quipu import LLM; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["set() True", "False"]


def test_outputs_are_in_order(llm: LLM) -> None:
    """Each prompt has its own output and usage, in the order of the prompts, however many there are."""
    prompts = [[number + 5] * (number % 7 + 1) for number in range(40)]
    params = [SamplingParams(max_tokens=number % 3 + 1, temperature=0) for number in range(40)]
    outputs = llm.generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [number % 3 + 1 for number in range(40)]
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        assert output.finished and output.usage is not None and output.outputs[0].finish_reason == "length"
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(prompt), param.max_tokens)


def test_calls_while_the_engine_stops() -> None:
    """Whatever is asked for at any moment of the end is told that the engine was stopped."""
    thread = EngineThread(resolve_settings("demo", {"executor": "fake"}))
    thread.start()
    thread.ready.result(PATIENCE_S)

    async def wait(_: Runtime) -> None:
        await trio.sleep_forever()

    stopping = threading.Thread(target=thread.stop)
    calls = [thread.submit(wait)]
    stopping.start()
    while stopping.is_alive():
        calls.append(thread.submit(wait))
        time.sleep(0)
    calls.append(thread.submit(wait))
    assert {str(call.future.exception(PATIENCE_S)) for call in calls} == {"the engine was stopped"}


def test_one_prompt(llm: LLM) -> None:
    """A text, a list of token ids and a conversation are each one request; n choices are outputs of one request."""
    assert len(llm.generate("A cord.", GREEDY)) == len(llm.generate([5, 6, 7], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []
    (output,) = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(n=3, max_tokens=2))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    two = llm.chat([[{"role": "user", "content": text}] for text in ("Hello", "Bye")], GREEDY)
    assert len({output.request_id for output in two}) == 2


def test_cached_tokens(llm: LLM, data_dir: Path) -> None:
    """The second request reuses the first one's whole blocks, says so, and the ledger has the same numbers."""
    prompt = [9] * 8 + [11] * 40
    cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 32
    with open_reader(data_dir=data_dir) as reader:
        for output in (cold, warm):
            found = reader.get(output.request_id)
            assert found is not None and output.usage is not None
            assert found.record.cached_tokens == output.usage.cached_tokens
            assert (found.record.prompt_tokens, found.record.completion_tokens) == (48, 6)
            assert (found.record.endpoint, found.record.model) == ("/v1/completions", "knots")


def test_fields_of_the_endpoints(llm: LLM) -> None:
    """Further fields are those of the endpoint: logprobs, another name of the model, tools."""
    (output,) = llm.generate("A cord.", SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1), model="demo")
    assert len(output.outputs[0].logprobs["token_logprobs"]) == 2 and output.prompt_logprobs
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2, logprobs=2))
    assert len(output.outputs[0].logprobs["content"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("params", "fields", "param"),
    [
        (SamplingParams(temperature=-1), {}, "temperature"),
        (SamplingParams(max_tokens=-1), {}, "max_tokens"),
        (GREEDY, {"model": "other"}, "model"),
        (GREEDY, {"colour": "red"}, "colour"),
        (SamplingParams(max_tokens=10**9), {}, "max_tokens"),
    ],
)
def test_invalid_request(llm: LLM, params: SamplingParams, fields: dict[str, str], param: str) -> None:
    """An invalid field raises its name, nothing is generated for the others, and the engine serves on."""
    with pytest.raises(RequestError) as raised:
        llm.generate(["good", "bad"], [GREEDY, params], **fields)
    assert raised.value.param == param and raised.value.status in (400, 404)
    eventually(lambda: held_in(llm.metrics()) == 0, "nothing is left of them")
    assert llm.generate("good", GREEDY)[0].finished


def test_number_of_parameters(llm: LLM) -> None:
    """Sampling parameters are one for all, or one for each."""
    with pytest.raises(ValueError, match="2 prompts and 3 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY] * 3)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"colour": "red"}, TypeError, "unknown setting 'colour'"),
        ({"port": 1}, TypeError, "concerns the HTTP server"),
        ({"max_model_len": 0}, ValueError, "--max-model-len: must be at least 1"),
        ({"executor": "abacus"}, ValueError, "--executor"),
        ({"model": "other"}, TypeError, "model"),
    ],
)
def test_invalid_settings(settings: dict[str, object], error: type[Exception], message: str) -> None:
    """A setting that there is not, has no effect here or is invalid is refused by its name."""
    with pytest.raises(error, match=message):
        LLM("demo", **settings)


def test_settings_are_flags(tmp_path: Path) -> None:
    """Switches, numbers, lists and None are taken as the flags would be, and a bad model is an error at once."""
    with LLM(
        "demo", executor="fake", enable_prefix_caching=False, max_model_len=256, num_blocks=64, kv_cache_memory=None
    ) as llm:
        prompt = [3] * 64
        assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nowhere"))


def test_lists_are_flags() -> None:
    """A list is taken as a flag takes it: as several words, or with commas between its parts."""
    found = resolve_settings("demo", {"ignore_config_entries": ["one", "two"], "served_model_name": ["a", "b"]}).config
    assert found.engine.ignored_config_entries == ("one", "two")
    assert found.model_names == ("a", "b")


def test_end(data_dir: Path) -> None:
    """After `close`, which may be repeated, requests raise EngineError, and the ledger's sums equal the counters."""
    folder = data_dir / "of its own"
    llm = LLM("demo", executor="fake", data_dir=folder)
    llm.generate(["A", "B"], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="stopped"):
        llm.generate("A cord.", GREEDY)
    (account,) = reconcile(data_dir=folder)
    assert account.agrees and account.ended == "stopped"


INTERRUPTED = """
import os, signal, threading
from quipu import LLM, SamplingParams
llm = LLM("demo", executor="fake", fake_step_seconds=0.01)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    llm.generate(["A cord."] * 3, SamplingParams(max_tokens=1500, ignore_eos=True))
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate("A cord.", SamplingParams(max_tokens=2))[0].outputs[0].token_ids))
"""


def test_interrupt() -> None:
    """Ctrl-C ends the call and its requests, the engine serves on, and the program ends by itself without `close`."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["interrupted", "2"], ""), signal.SIGINT
