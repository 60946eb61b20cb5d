"""The draft model in an engine.

On the fake backend, whose draws depend on all that it reads of a sequence's blocks: a draft model with the same dials
guesses right if its own blocks hold what they should, and only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import attrs
import pytest

from quipu.actors.engine.executor.draft_depth import FREE, Drafting, PassCosts, StepSize, choose_depths
from quipu.actors.engine.executor.draft_model import DraftModel
from quipu.actors.engine.executor.draft_search import Draft
from quipu.actors.engine.executor.drafter import Drafter
from quipu.actors.engine.executor.model_drafts import TRIAL_EVERY, ModelDrafts
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scheduler import StepDone, StepFailed
from quipu.kernels.backend import BackendConfig
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import Dials, FakeBackend
from tests.actors.engine.engine_bench import EngineBench, backend_config
from tests.actors.engine.reported_sequences import Submission
from tests.fake_oracle import continuation

LIMITS = SchedulerConfig(
    block_size=4, num_blocks=121, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, most_draft_tokens=24
)
LARGE = attrs.evolve(LIMITS, max_num_batched_tokens=300)
DEPTH = 8
CHEAP = PassCosts((1,), (0.01,))
"""Guesses of the draft model always pay, if they are right..."""
LINEAR = PassCosts((1, 2), (1.0, 2.0))
"""Nothing is worth verifying."""
DEAR = PassCosts((1,), (1.0,))
"""...and never."""


class WatchedBackend(FakeBackend):
    """Keeps how many tokens and rows each pass had, and draws wrong tokens at some positions."""

    def __init__(self, config: BackendConfig, dials: Dials) -> None:
        super().__init__(config, dials)
        self.passes: list[tuple[int, int]] = []
        self.wrong_every = 1 << 30

    def step(self, batch: StepBatch) -> Drawn:
        self.passes.append((len(batch.token_ids), len(batch.slots)))
        drawn = super().step(batch)
        lasts = [batch.positions[row] + batch.query_start[row + 1] - batch.query_start[row] - 1 for row in drawn.rows]
        wrong = [(last + 1) % self.wrong_every == 0 for last in lasts]
        token_ids = [token_id ^ is_wrong for token_id, is_wrong in zip(drawn.token_ids, wrong, strict=True)]
        return attrs.evolve(drawn, token_ids=token_ids)


class TextlessDrafter(Drafter):
    """Finds nothing in texts."""

    def _find(self, *_: object) -> Draft:
        return Draft([], [])


class ModelBench(EngineBench):
    """An engine with a draft model, which finds no drafts in texts."""

    def __init__(
        self,
        limits: SchedulerConfig = LIMITS,
        *,
        other: Dials | None = None,
        costs: PassCosts = CHEAP,
        watermark: int = 0,
    ) -> None:
        """`other`: the draft model's own dials, if it is not the model itself."""
        super().__init__(limits, dials=Dials(most_tokens=1 + DEPTH, applies_rules=True), watermark=watermark)
        self.draft_dials = other or Dials(applies_rules=True)
        self.draft_backend = WatchedBackend(backend_config(limits), self.draft_dials)
        self.model = DraftModel(self.draft_backend, costs, max_num_tokens=limits.max_num_batched_tokens)
        self.drafter = TextlessDrafter(
            max_depth=DEPTH, max_tokens=24, shares_outputs=False, model=ModelDrafts(self.model)
        )
        self.executor = Executor(
            self.executor.backend, max_num_seqs=limits.max_num_seqs, drafter=self.drafter, others=[self.draft_backend]
        )

    def drafted(self) -> list[tuple[int, int]]:
        """Return, of each draft, how many tokens it had and how many were kept."""
        return [(end - start, kept - start) for start, kept, end in self._drafts_done()]

    def _drafts_done(self) -> Iterator[tuple[int, int, int]]:
        """Yield the position of each draft's first token, the end of what was kept, and its own."""
        for done in self.handled:
            if isinstance(done, StepDone):
                for row, end in zip(done.draft_rows, done.draft_ends, strict=True):
                    yield done.row_starts[row] + 1, done.row_ends[row], end

    def check(self, *submissions: Submission) -> None:
        """Assert that every guess was right, and every output what single steps would draw."""
        self.check_at_rest()
        for submission in submissions or self.submissions.values():
            sampling = submission.sampling
            seed = sampling.seed if sampling.temperature else 0
            expected = continuation(submission.prompt, sampling.max_tokens, self.dials, seed)
            assert submission.tokens == expected, submission.id
        every = self.draft_backend.wrong_every
        found = list(self._drafts_done())
        assert found
        for start, kept, end in found:  # up to the first token that was drawn wrong
            assert kept == min(end, -(-start // every) * every), (start, kept, end)


def prompt_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000, 2000) for _ in range(length)]


def test_same_model_is_always_right() -> None:
    """A draft model that is the model itself guesses every token, greedy and seeded: nine tokens a step."""
    bench = ModelBench()
    for seed in (None, 5):
        bench.handled.clear()
        bench.submit(prompt_of(18, 1), 90, seed=seed)
        bench.finish()
        bench.check()
        assert len(bench.handled) < 16


def test_rules() -> None:
    """The draft model draws under the sequence's rules, each guess as if those before it had been drawn."""
    bench = ModelBench()
    rules = LogitRules(allowed_token_ids=(40, 41, 42, 43), bad_words=((43, 43), (40, 40)))
    (submission,) = bench.submit(prompt_of(18, 1), 60, rules=rules)
    bench.finish()
    drafted = bench.drafted()
    assert {*submission.tokens} <= {40, 41, 42, 43} and len(submission.tokens) == 60
    assert sum(num for num, _ in drafted) > 40 and all(num == kept for num, kept in drafted)


def test_computes_what_it_lacks_once() -> None:
    """A prompt is computed when its first token is guessed; behind a cached prefix only what is not cached; what was
    guessed right is never computed again."""
    bench = ModelBench()
    prompt = prompt_of(40, 1)
    bench.submit(prompt, 30)
    bench.finish()
    first = sum(tokens for tokens, _ in bench.draft_backend.passes)
    assert 40 + 25 <= first <= 40 + 30
    bench.draft_backend.passes.clear()
    bench.submit([*prompt[:36], 7, 8, 9], 30)
    bench.finish()
    assert sum(tokens for tokens, _ in bench.draft_backend.passes) <= 3 + 30
    bench.check()


def test_shared_prefix_is_computed_once_in_a_pass() -> None:
    """What sequences share that begin together is computed for the first of them, and read by the others."""
    bench = ModelBench()
    prompt = prompt_of(40, 1)
    bench.submit(prompt, 30, seed=3, num_choices=4)
    bench.finish()
    bench.check()
    assert max(tokens for tokens, _ in bench.draft_backend.passes) < 40 + 4 * 8


def test_passes_are_bounded() -> None:
    """A text is computed over several steps if a pass cannot have all of it, and guessed for then."""
    bench = ModelBench()
    for seed in range(3):
        bench.submit(prompt_of(150, seed), 40)
    bench.finish()
    bench.check()
    assert max(tokens for tokens, _ in bench.draft_backend.passes) == LIMITS.max_num_batched_tokens


@pytest.mark.parametrize("wrong_every", [1 << 30, 5])
@pytest.mark.parametrize("seed", range(8))
def test_right_whatever_happens_to_blocks(seed: int, wrong_every: int) -> None:
    """Guesses are right behind hits, copies of last blocks, preemptions, evictions and wrong guesses, in any order."""
    random = Random(seed)
    bench = ModelBench(attrs.evolve(LIMITS, num_blocks=36, max_model_len=120))
    bench.draft_backend.wrong_every = wrong_every
    prefixes = [prompt_of(length, 100 + length) for length in (8, 16, 17, 30)]
    for _ in range(40):
        for _ in range(random.randrange(3)):
            prefix = random.choice(prefixes)
            prompt = prefix + prompt_of(random.choice((0, 0, 1, 4, 9)), random.randrange(3))
            choices = random.choice((1, 1, 2, 3))
            bench.submit(prompt, random.randrange(1, 40), seed=random.choice((None, 1, 2)), num_choices=choices)
        if random.random() < 0.1:
            bench.reset_prefix_cache()
        bench.drafter.costs = random.choice((*[FREE] * 5, LINEAR))  # so that it does not guess in each step
        for _ in range(random.randrange(12)):
            if bench.results and random.random() < 0.6:
                bench.handle_one()
            elif bench.plans:
                bench.run_one()
    bench.finish()
    bench.check()
    assert any(submission.num_preempted for submission in bench.submissions.values()), "the pool must be too small"


def test_other_model_is_given_up() -> None:
    """A draft model that is always wrong changes nothing, and soon guesses only one token now and then."""
    bench = ModelBench(LARGE, other=Dials(first_token_id=900), costs=PassCosts((1,), (0.3,)))
    submissions = [bench.submit(prompt_of(12, seed), 180)[0] for seed in range(4)]
    bench.finish()
    for submission in submissions:
        assert submission.tokens == continuation(submission.prompt, 180, bench.dials)
    drafted = bench.drafted()
    assert drafted and not any(kept for _, kept in drafted)
    assert sum(num for num, _ in drafted) < 60
    bench.handled.clear()
    bench.draft_backend.passes.clear()
    for seed in range(4):
        bench.submit(prompt_of(12, 10 + seed), 180)
    bench.finish()
    assert [num for num, _ in bench.drafted()] == [1] * len(bench.drafted())
    assert 0 < len(bench.drafted()) <= len(bench.handled) // TRIAL_EVERY + 1


def test_trial_tells_that_it_pays_again() -> None:
    """A draft model that has been given up guesses again once its trials are right."""
    bench = ModelBench(LARGE, other=Dials(first_token_id=900))
    bench.submit(prompt_of(12, 1), 180)
    bench.finish()
    bench.draft_dials.first_token_id = bench.dials.first_token_id
    for seed in range(60):
        bench.handled.clear()
        bench.submit(prompt_of(12, 10 + seed), 180)
        bench.finish()
        if len(bench.handled) < 60:
            return
    raise AssertionError("it never guesses again")


def test_costly_model_guesses_nothing() -> None:
    """Where the draft model's pass costs what the model's does, it is not run, but for trials."""
    bench = ModelBench(costs=DEAR)
    (submission,) = bench.submit(prompt_of(12, 1), 60)
    bench.finish()
    assert submission.tokens == continuation(submission.prompt, 60, bench.dials)
    assert not bench.draft_backend.passes


def test_failed_draft_pass() -> None:
    """A pass of the draft model that raises fails the step, which is run again; nothing half-written is read later."""
    bench = ModelBench()
    prompt = prompt_of(30, 1)
    bench.submit(prompt, 60)
    bench.submit(prompt_of(9, 2), 60)
    bench.model.costs = DEAR
    for _ in range(6):
        bench.step()  # so that both prompts are lacking
    bench.model.costs = CHEAP
    for _ in range(3):
        bench.draft_dials.fail_steps = 1
        while not isinstance(bench.step(), StepFailed):
            pass
    bench.submit([*prompt, 5], 60)
    bench.finish()
    bench.check()
    assert sum(isinstance(result, StepFailed) for result in bench.handled) == 3


def test_broken_logits_end_a_draft() -> None:
    """Where the draft model's logits are broken, it guesses nothing further."""
    bench = ModelBench(other=Dials(nan_token_id=7))
    (submission,) = bench.submit([*prompt_of(11, 1), 7], 40)
    bench.finish()
    assert submission.tokens == continuation(submission.prompt, 40, bench.dials)
    assert all(num == kept for num, kept in bench.drafted())


def test_cost_of_guessing() -> None:
    """A draft model's passes count: one for each token of the longest draft, and what it lacks of a text."""
    step, passes = StepSize(2, 2, 0), PassCosts((1,), (0.2,))

    def depths(catch_up: list[float | None], costs: PassCosts = passes) -> list[int]:
        chances = [[0.9, 0.8, 0.3, 0.1], [0.85, 0.75, 0.3, 0.1]]
        return choose_depths(chances, [0, 0], 64, step, FREE, Drafting(costs, catch_up)).of_rows

    assert depths([None, None]) == [4, 4]
    assert depths([0.0, 0.0]) == [2, 2]
    assert depths([None, 0.0]) == [2, 1]
    assert depths([3.0, 0.0]) == [0, 2], "a row that lacks too much must not keep another from being guessed for"
    assert depths([0.0, 0.0], PassCosts((1,), (3.0,))) == [0, 0]
