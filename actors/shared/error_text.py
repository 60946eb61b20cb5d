"""What an error says, as text for another process: names in damaged files may be as long as these, and no text at all.

What must always hold: the text can be encoded, and its length is bounded.
"""

from __future__ import annotations

MAX_CHARACTERS = 16_384


def error_text(error: BaseException) -> str:
    """Return what an error says, or its type if it says nothing."""
    text = (str(error) or type(error).__name__).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
