"""Truthful servers, drawn: none of them may ever be accused.

    python -m tests.web.cli.audit.drawn_truths [--runs 200] [--seed 0]

prints what an audit calls false, and exits with 1 if there is anything.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

from quipu.web.cli.audit.exchange import PATHS
from quipu.web.cli.audit.verdicts import Verdict
from tests.web.cli.audit.fake_audits import audit
from tests.web.cli.audit.fake_server import FakeServer, Truth


def draw_truth(seed: int) -> tuple[Truth, dict[str, Any]]:
    """Return a truthful server, and how it is audited."""
    draw = random.Random(f"truth {seed}")
    rare = lambda *values: draw.choice([0.0, 0.0, *values])  # noqa: E731
    apis = frozenset(draw.sample(list(PATHS), draw.randint(1, 4)))
    has_least = draw.random() < 0.2
    truth = Truth(
        block_size=draw.choice([1, 16, 16, 32, 64, 128, 7]),
        num_blocks=draw.choice([10**6, 10**4, 200, 60, 20]),
        template=draw.choice([0, 3, 40, 300, 1500]),
        apis=apis,
        reporting=draw.choice([apis, apis, apis, frozenset(draw.sample(sorted(apis), 1)), frozenset()]),
        is_flat=draw.random() < 0.2,
        least=1024 if has_least else 0,
        step=128 if has_least else 1,
        num_replicas=draw.choice([1, 1, 2, 3]),
        missing=rare(0.1, 0.5, 1.0),
        retried=rare(0.02, 0.05),
        busy=rare(0.1),
        others=rare(0.1, 0.5),
        letters=draw.choice([1, 4, 16]),
        digits=draw.choice([1, 3]),
        prefill_s=draw.choice([1e-6, 1e-4, 2e-3]),
        jitter_s=draw.choice([0.001, 0.01, 0.3]),
        knows_salts=draw.random() < 0.5,
        keeps_keys_apart=draw.random() < 0.5,
        has_choices=draw.random() < 0.7,
        takes_ids=draw.random() < 0.7,
        has_running_usage=draw.random() < 0.2,
        has_placeholder_start=draw.random() < 0.3,
        waits_for_siblings=draw.random() < 0.5,
        continues_prompts=draw.random() < 0.5,
    )
    how: dict[str, Any] = {"prompt_tokens": 1200 if has_least else draw.choice([150, 300, 500])}
    how |= {"concurrency": draw.randint(1, 6), "has_pressure": draw.random() < 0.3}
    how["metrics_url"] = "http://fake/metrics" if draw.random() < 0.5 else None
    return truth, how


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.web.cli.audit.drawn_truths", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counted: Counter[str] = Counter()
    num_accused = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        truth, how = draw_truth(seed)
        outcome = audit(FakeServer(truth, seed=seed), seed=seed, **how)
        counted.update(str(finding.verdict) for finding in outcome.findings)
        for finding in outcome.findings:
            if finding.verdict is Verdict.FALSE:
                num_accused += 1
                print(f"{seed}: {finding.check} ({finding.api}, {finding.is_stream}): {finding.reason}")
                print(f"    {truth}\n    {how}")
    print(f"{arguments.runs} truthful servers, {num_accused} accusations; {dict(counted)}")
    sys.exit(1 if num_accused else 0)


if __name__ == "__main__":
    main()
