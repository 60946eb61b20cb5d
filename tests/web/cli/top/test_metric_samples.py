"""How much counters have grown is exact, also when a server was started anew or sends nonsense."""

from __future__ import annotations

import pytest

from quipu.web.cli.top import metric_samples
from quipu.web.cli.top.metric_samples import InvalidMetrics, growth, parse_samples


def text_of(server: str, **counts: float) -> str:
    """Return /metrics with a counter of requests by outcome."""
    lines = [f'quipu:requests_total{{outcome="{outcome}"}} {count}' for outcome, count in counts.items()]
    return "\n".join([f'quipu:ledger_info{{server="{server}"}} 1.0', *lines, "other_total 7.0"]) + "\n"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (text_of("a", finished=5), text_of("a", finished=7), 2),
        (text_of("a", finished=5, failed=1), text_of("a", finished=7, failed=4), 5),
        (text_of("a", finished=5), text_of("a", finished=5, failed=3), 3),
        (text_of("a", finished=5, failed=3), text_of("a", finished=6), 1),
        (text_of("a", finished=5), text_of("b", finished=2), 2),
        (text_of("a", finished=5), text_of("b", finished=9), 9),
        (text_of("a", finished=5), text_of("a", finished=2), 2),
    ],
    ids=["grown", "two series", "new series", "series gone", "restarted", "restarted and beyond", "reset"],
)
def test_growth(before: str, now: str, expected: float) -> None:
    """A new server's counters began at 0, whether or not they have passed the old one's by now."""
    assert growth(parse_samples(before), parse_samples(now), "requests_total") == expected


def test_labels() -> None:
    """Sums are over the series that have the given labels, and others do not count."""
    now = parse_samples(text_of("a", finished=5, failed=2))
    assert now.total("requests_total") == 7 and now.total("requests_total", outcome="failed") == 2
    assert now.total("requests_total", outcome="other") == now.total("other_total") == 0
    assert now.values("outcome", "requests_total") == ["failed", "finished"]
    assert growth(parse_samples(text_of("a")), now, "requests_total", outcome="failed") == 2
    assert (now.server, parse_samples("").server) == ("a", "")


def test_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no number of something is left out; a text in another format, or too long a one, is an error."""
    assert parse_samples("quipu:a NaN\nquipu:b +Inf\nquipu:c 1e300\nquipu:d -3\n").by_name == {"d": {frozenset(): -3.0}}
    for text in ("<html>\n", "quipu:a{b 1\n", 'quipu:a{b="c"} x\n', "hello\n"):
        with pytest.raises(InvalidMetrics, match="format"):
            parse_samples(text)
    monkeypatch.setattr(metric_samples, "MAX_SAMPLES", 3)
    with pytest.raises(InvalidMetrics, match="more than 3"):
        parse_samples("".join(f"a{number} 1\n" for number in range(4)))


def test_texts_that_take_long() -> None:
    """A text that would keep the parser busy for seconds is not parsed."""
    many = "quipu:a{" + ",".join(f'b{number}="c"' for number in range(300)) + "} 1\n"
    for text in (many * 1000, f'quipu:a{{b="{"x" * 10_000}"}} 1\n'):
        with pytest.raises(InvalidMetrics, match="too many labels, or too long a line"):
            parse_samples(text)
