"""The names that a chat template uses."""

from __future__ import annotations

import pytest

from quipu.actors.shared.template_names import names_in


@pytest.mark.parametrize(
    ("source", "shows_calls"),
    [
        ("{% for t in tools %}{% endfor %}{{ m.tool_calls }}", True),
        ("{% if 'tool_calls' in m %}{{ m['tools'] }}{% endif %}", True),
        ("{{ m.tool_calls }}", False),
        ("Call tools, see tool_calls. {# tools, tool_calls #}", False),
    ],
)
def test_calls(source: str, shows_calls: bool) -> None:
    """A template shows calls if it uses both tools and calls; prose and comments that mention them do not count."""
    assert names_in(source).shows_calls is shows_calls


def test_kinds_of_names() -> None:
    """Variables and attributes are distinguished, however an attribute is written."""
    names = names_in("{% for m in messages %}{{ m.role }}{{ m['tools'] }}{{ 'x' }}{% break %}{% endfor %}")
    assert names.variables >= {"messages", "m"} and names.attributes == {"role", "tools"}
    assert "x" in names and "y" not in names


def test_generation_blocks() -> None:
    """Names within the blocks that mark generated text count as well."""
    names = names_in("{% generation %}{{ m.tool_calls }}{% endgeneration %}{% for t in tools %}{% endfor %}")
    assert names.shows_calls and "generation" not in names
