"""Expressions of an adapter's configuration match what `re` matches, in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.adapters.name_patterns import NamePattern

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.11.mlp.experts.3.up_proj",
    "",
    "layers",
]
PATTERNS = [
    "q_proj",
    r".*\.(q|k|v)_proj",
    r".*_proj$",
    r"^model\.layers\.(?:[02468]|1[0-9])\..*",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|down_proj))",
    r"^(?!.*experts).*(?:up_proj|down_proj|q_proj)$",
    r"(?=.*mlp).*proj",
    r".*\.\d{1,2}\.[^.]+\.\w+",
    r"(model|layers|\.|\d)+.*?",
    r"\D*\d\D*",
    r".*[^a-z\d].*",
    r"(a*)*b?.*",
    r"(layers)??s?",
    r"\S+",
    r".{3,}_.{1,4}",
    r"()",
    r"(?P<kind>lm)_head",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_as_re(pattern: str) -> None:
    """Match whole names, and their ends after a dot, as PEFT's own expressions do."""
    ours = NamePattern("target_modules", pattern)
    for name in NAMES:
        assert ours.matches(name) == bool(re.fullmatch(pattern, name))
        assert ours.matches_end(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


PIECES = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "$", "^", "(?!a)", "(?=b)"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@given(PIECES, st.text("ab.", max_size=7))
def test_random_expressions_match_as_re(pattern: str, name: str) -> None:
    """Match as `re` does for any combination of what is supported."""
    assert NamePattern("target_modules", pattern).matches(name) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*c", "(.*)*(.*)*(.*)*x", "((a?){50}){50}b"])
def test_expressions_that_take_re_years(pattern: str) -> None:
    """End, either with the answer or with a refusal."""
    try:
        assert not NamePattern("target_modules", pattern).matches("a" * 60)
    except ValueError as error:
        assert "takes too long" in str(error)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "not a regular expression"),
        ("(?i)q_proj", "flags"),
        (r"(q)\1", "groupref"),
        (r"(?<=q)_proj|q(?<=q)_proj", "assert"),
        (r"\bq_proj", "at"),
        ("(?>q_proj)", "atomic_group"),
        ("(?i:q_proj)", "subpattern"),
        ("q" * 3000, "characters"),
        ("(" * 900 + ")" * 900, "nested too deeply"),
        (r"\(" * 800 + "(" * 101 + "q" + ")" * 101, "nested too deeply"),
    ],
)
def test_refusals(pattern: str, said: str) -> None:
    """Name the entry and what is not supported."""
    with pytest.raises(ValueError, match=f"adapter_config.json: exclude_modules: .*({said})"):
        NamePattern("exclude_modules", pattern).matches("q_proj")
