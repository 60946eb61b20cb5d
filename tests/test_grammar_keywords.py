"""The table of JSON Schema's keywords in docs/use/structured-output.md."""

from __future__ import annotations

from scripts.grammar_keywords import main, table


def test_document_is_up_to_date() -> None:
    """The document says what becomes of each keyword with the library that is installed."""
    assert main(["--check"]) == 0, "run python -m scripts.grammar_keywords"


def test_nothing_is_ignored() -> None:
    """Every keyword is enforced or refused."""
    assert "not enforced" not in table() and table().count("| enforced |") > 40
