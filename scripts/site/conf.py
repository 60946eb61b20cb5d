"""Sphinx's configuration of the documents' site (`make docs`). Its pages are laid out by `scripts/site/stage.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import quipu

project = "quipu"
author = "The quipu authors"
copyright = author
version = release = quipu.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["files"]

myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4  # as GitHub makes them
highlight_language = "none"
# answers are shortened with "...", which is no JSON; they are highlighted all the same
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
default_role = "code"  # docstrings mark code with single backticks
# types that have no page here: other libraries', and aliases
nitpick_ignore_regex = [("py:.*", r"(?!quipu\.).*|quipu\.web\..*")]

html_theme = "furo"
html_title = "quipu"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [(path.name, {"defer": "defer"}) for path in sorted((Path(__file__).parent / "static").glob("*.js"))]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Any) -> None:
    """Read docstrings as they are written: what is indented after a blank line is code."""
    app.connect("autodoc-process-docstring", _mark_code)


def _mark_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    marked: list[str] = []
    for line in lines:
        begins = re.match(r" +\S", line) and marked and not marked[-1].strip()
        if begins and not any(re.match(r" +\S", one) for one in marked[-2:-1]):
            marked += [".. code-block:: python", ""]
        marked.append(line)
    lines[:] = marked
