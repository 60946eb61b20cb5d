"""Engines that die in the middle of their work, and a client that sends them requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn
from unittest import mock

import attrs
import trio
import trio.testing

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import LoopHost, loop_hosts
from quipu.actors.engine.executor.launched_step import LaunchedStep
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.grammar import GrammarSpec
from quipu.actors.messages.handler import Closed, Delta, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scheduler import StepResult
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import Dials, FakeBackend
from tests.grammars import EOS
from tests.runtimes import Client, load_with_kept_vocabulary, open_with_kept_vocabulary, runtime_config, serving_info


def fed_by(plan: StepPlan, known: dict[int, list[int]]) -> Iterator[int]:
    """Yield the tokens that a plan's chunks compute. `known`: the tokens of each sequence so far, by id."""
    known.update((admit.sequence_id, admit.tokens) for admit in plan.admitted)
    chunks = zip(plan.row_ids[plan.num_going_on :], plan.chunk_starts, plan.chunk_counts, strict=True)
    for sequence_id, start, count in chunks:
        yield from known[sequence_id][start : start + count]


@attrs.define
class Deaths:
    """When engines die. Every engine counts its steps."""

    at_steps: list[int] = attrs.field(factory=list)
    """The step, counted from 1, in which the first engine dies, the second, and so on; later engines survive."""
    token_ids: frozenset[int] = frozenset()
    """An engine dies in a step that would compute one of these tokens."""
    after_step: bool = False
    """Whether the step is computed before the death, and only its result is lost."""
    applies_rules: bool = False
    """Whether a fake executor applies a sequence's logit rules."""
    num_deaths: int = 0
    num_engines: int = 0

    def die(self) -> NoReturn:
        self.num_deaths += 1
        raise SystemError("segmentation fault")

    def load(self, config: EngineConfig) -> Executor:
        executor = load_with_kept_vocabulary(config)
        if isinstance(executor.backend, FakeBackend):
            executor.backend.dials.applies_rules = self.applies_rules
        launch, finish = executor.launch, executor.finish
        limit = self.at_steps[self.num_engines] if self.num_engines < len(self.at_steps) else None
        self.num_engines += 1
        num_steps = 0
        deadly: LaunchedStep | None = None
        known: dict[int, list[int]] = {}

        def launch_or_die(plan: StepPlan, behind: LaunchedStep | None = None) -> LaunchedStep:
            nonlocal num_steps, deadly
            num_steps += 1
            dies = num_steps == limit or not self.token_ids.isdisjoint(fed_by(plan, known))
            if dies and not self.after_step:
                self.die()
            step = launch(plan, behind)
            if dies:
                deadly = step
            return step

        def finish_or_die(step: LaunchedStep, following: LaunchedStep | None = None) -> StepResult:
            result = finish(step, following)
            if step is deadly:
                self.die()
            return result

        setattr(executor, "launch", launch_or_die)  # noqa: B010 - assigned, it would be a method's type
        setattr(executor, "finish", finish_or_die)  # noqa: B010
        return executor


@attrs.define
class PassingFaults:
    """Passes of a backend, and how many of them were made to raise."""

    num_passes: int = 0
    num_raised: int = 0


@contextmanager
def every_fourth_pass_raising(client: Client, when: str) -> Iterator[PassingFaults]:
    """Make every fourth pass of the client's engine raise, `before` or `after` the backend has run it."""
    backend, faults = client.engine.executor.backend, PassingFaults()
    step = backend.step

    def step_or_raise(batch: StepBatch) -> Drawn:
        faults.num_passes += 1
        if faults.num_passes % 4:
            return step(batch)
        faults.num_raised += 1
        if when == "after":
            step(batch)
        raise RuntimeError("a passing fault")

    with mock.patch.object(backend, "step", step_or_raise):
        yield faults


@attrs.frozen
class Output:
    """What a client received for one request."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    scores: tuple[Any, ...]
    prompt_scores: tuple[Any, ...]
    reasons: tuple[FinishReason | None, ...]
    usage: tuple[int | None, ...]
    record: UsageRecord = attrs.field(eq=False)
    error: Any = None


@asynccontextmanager
async def open_deadly(deaths: Deaths, **changes: Any) -> AsyncIterator[Client]:
    """Open a runtime whose engines die as `deaths` says. The executor is the fake one unless `changes` name another."""
    settings = {"eos_token_ids": (EOS,), "reasoning_parser": "qwen3", "restart_backoff_s": 0.0, **changes}
    config = runtime_config(**settings)
    host = LoopHost(config.engine, deaths.load)
    hosts = loop_hosts(config.engine, deaths.load) if config.num_engines > 1 else lambda _: host
    async with open_with_kept_vocabulary(config, serving_info(config), hosts, make_renderer=InlineRenderer) as runtime:
        with trio.fail_after(100):
            while not runtime.desk.health().is_ready:
                await trio.sleep(0.001)
            yield Client(runtime, config, Dials())


async def ask(
    client: Client,
    prompt: list[int],
    *,
    grammar: GrammarSpec | None = None,
    rules: LogitRules | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    filters: Mapping[str, float] | None = None,
    on_delta: Callable[[Delta], object] = lambda delta: None,
    **fields: Any,
) -> Output:
    """Serve one request to its end. `filters`: `top_p`, `top_k` and `min_p`."""
    request = client.encode(
        prompt, grammar=grammar, with_token_ids=True, **{"max_tokens": 12, "temperature": 1.0, "seed": 3, **fields}
    )
    scored = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    sampling = attrs.evolve(request.sampling, **scored, rules=rules, **(filters or {}))
    ticket = client.runtime.desk.open(attrs.evolve(request, sampling=sampling), "test")
    num = request.num_choices
    texts = [""] * num
    token_ids: list[list[int]] = [[] for _ in range(num)]
    scores: list[list[Any]] = [[] for _ in range(num)]
    reasons: list[FinishReason | None] = [None] * num
    prompt_scores: list[Any] = []
    try:
        await ticket.start()
        while True:
            for event in await ticket.mailbox.get():
                if isinstance(event, Closed):
                    record = event.record
                    usage = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
                    return Output(
                        tuple(texts),
                        tuple(map(tuple, token_ids)),
                        tuple(map(tuple, scores)),
                        tuple(prompt_scores),
                        tuple(reasons),
                        usage,
                        record,
                        event.error,
                    )
                if isinstance(event, Delta):
                    on_delta(event)
                    texts[event.index] += event.text
                    token_ids[event.index] += event.token_ids or ()
                    reasons[event.index] = event.finish_reason or reasons[event.index]
                    if isinstance(event, ScoredDelta):
                        scores[event.index] += event.scores
                        if event.of_prompt is not None and (found := event.of_prompt.scores) is not None:
                            prompt_scores += found.tokens(0, len(found), 2)
    finally:
        ticket.leave()


async def settle(client: Client) -> None:
    """Wait until everything has ended, and assert that nothing is left."""
    runtime = client.runtime
    with trio.fail_after(60):
        while (
            not runtime.desk.health().is_ready
            or runtime.desk.num_live_sequences
            or runtime.entry_store.num_open_accounts
        ):
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
    client.assert_at_rest()
