"""Steps that have little room for images that no step may divide: who waits, who does not, and for how long."""

from __future__ import annotations

import attrs
import pytest

from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.token_budget import TokenBudget
from quipu.actors.engine.scheduler.waiting import Policy
from quipu.actors.messages.outcomes import ErrorKind
from quipu.kernels.fake import Dials
from tests.actors.engine.engine_bench import EngineBench
from tests.actors.engine.reported_sequences import Submission

IMAGE = 12
LIMITS = SchedulerConfig(
    block_size=2,
    num_blocks=400,
    max_num_seqs=4,
    max_num_batched_tokens=IMAGE + 4,
    max_model_len=100,
    whole_image_tokens=IMAGE,
    max_steps_in_flight=1,
)


def text(index: int, length: int) -> list[int]:
    """Return a prompt that `images_of` gives no image, since it is too short."""
    assert length < 2 + IMAGE
    return [100 + index] * length


def with_image(first: int, num_images: int = 1) -> list[int]:
    """Return a prompt with images from position 2 on."""
    return [first] * (2 + num_images * IMAGE + 1)


def busy_bench(limits: SchedulerConfig, dials: Dials | None = None) -> EngineBench:
    """Return an engine that runs a step, so that what is submitted now is planned together."""
    bench = EngineBench(limits, dials=dials)
    bench.submit([99], 1)
    return bench


def admitted(bench: EngineBench) -> list[int]:
    """Return whom the next step admits."""
    return [admit.sequence_id for admit in bench.plans[0].admitted]


def chunks(bench: EngineBench) -> dict[int, int]:
    """Return the chunks of the next step, by sequence."""
    plan = bench.plans[0]
    return dict(zip(plan.row_ids[plan.num_going_on :], plan.chunk_counts, strict=True))


def test_nobody_takes_an_images_room() -> None:
    """A prompt that begins with an image, behind a cached prefix, is admitted as soon as a step has room for it: who
    arrives behind it cannot take what is left of each step."""
    bench = EngineBench(LIMITS)
    bench.submit([7, 7], 1)
    bench.finish()
    bench.submit([99], 1)
    bench.submit(text(0, 13), 1)
    (image,) = bench.submit(with_image(7), 1)
    others = [bench.submit(text(1 + index, 13), 1)[0] for index in range(6)]
    order = []
    bench.step()
    while not image.terminal:
        order += admitted(bench)
        bench.step()
    assert image.admissions == [2]
    assert order.index(image.id) == 1 and set(order[2:]) <= {other.id for other in others}
    bench.finish()
    bench.check_at_rest()


def test_running_text_goes_on() -> None:
    """A running prompt whose image finds no room in a step does not keep those behind it from the rest of the step, and
    is served in the next."""
    bench = busy_bench(attrs.evolve(LIMITS, max_num_batched_tokens=IMAGE + 8))
    (first,) = bench.submit(with_image(7, 2), 1)
    (second,) = bench.submit(with_image(8), 1)
    (third,) = bench.submit(text(0, 6), 1)
    bench.step()
    seen = []
    while bench.plans:
        seen.append(chunks(bench))
        bench.step()
    # 2 + 12 of the first and 2 of the second, whose image has no room beside the first one's; so the third gets it
    assert seen[0] == {first.id: 14, second.id: 2, third.id: 4}
    assert seen[1] == {first.id: 13, third.id: 2}
    assert seen[2] == {second.id: 13}
    bench.check_at_rest()


@pytest.mark.parametrize("policy", Policy)
def test_limits_below_an_image(policy: Policy) -> None:
    """Neither a limit for chunks, nor shares of tenants, nor drafts stop an image; tenants have steps in turn."""
    limits = attrs.evolve(LIMITS, policy=policy, long_prefill_token_threshold=3)
    bench = busy_bench(limits, Dials(most_tokens=4))
    images = [bench.submit(with_image(7 + index, 2), 12, domain="abc"[index])[0] for index in range(3)]
    served: list[int] = []
    for _ in range(100):
        if not bench.plans:
            break
        served += [sequence_id for sequence_id, count in chunks(bench).items() if count >= IMAGE]
        bench.step()
    bench.check_at_rest()
    assert len(served) == 6 and all(image.reason == "length" for image in images)
    if policy is Policy.FAIR:
        assert len(set(served[:3])) == 3


def test_drafts_leave_room() -> None:
    """Sequences that may advance by several positions advance by fewer than the budget allows: an image has room beside
    them as soon as it comes."""
    bench = EngineBench(LIMITS, dials=Dials(most_tokens=4))
    texts = [bench.submit(text(index, 3), 80)[0] for index in range(3)]
    for _ in range(4):
        bench.step()
    (image,) = bench.submit(with_image(7), 1)
    bench.step()
    assert image.id in admitted(bench) and len(bench.plans[0].row_ids) == 4
    bench.step()
    assert chunks(bench)[image.id] >= IMAGE
    bench.finish()
    assert all(one.reason == "length" for one in texts)
    bench.check_at_rest()


def test_memory_for_no_image() -> None:
    """A request with an image that fits in no step's memory gets an error that asks to come back, and others finish."""
    bench = EngineBench(LIMITS, dials=Dials(max_tokens_in_memory=IMAGE - 1))
    images = [bench.submit(with_image(7 + index), 3)[0] for index in range(2)]
    others: list[Submission] = [bench.submit(text(index, 9), 3)[0] for index in range(2)]
    bench.finish()
    bench.check_at_rest()
    assert all("not enough memory" in (image.error or "") for image in images)
    assert all(other.reason == "length" for other in others)
    kinds = {terminal for report in bench.reports for terminal in report.terminal_error_kinds if terminal}
    assert kinds == {ErrorKind.OVERLOADED}


def test_budget_keeps_room() -> None:
    """However little memory there is, the budget of a step keeps room for an image beside all other sequences."""
    budget = TokenBudget(100, lambda: 0.0, LIMITS.least_budget)
    for _ in range(9):
        budget.lower(100)
    assert budget.current() == IMAGE + 4
    assert attrs.evolve(LIMITS, whole_image_tokens=0).least_budget == 1
