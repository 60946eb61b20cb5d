"""What both servers of `bench.sse` stream: the same tokens in the same steps, each of which has a text."""

from __future__ import annotations

from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import load_library


class TokenSource:
    """Ids whose text is plain words: a part of a character would bring no event of its own."""

    def __init__(self) -> None:
        library = load_library(DEMO)
        texts = {i: library.tokenizer.decode([i]) for i in range(300, 3900)}
        self._ids = [i for i, text in texts.items() if text.isascii() and text.strip().isalpha()]

    def of_step(self, step: int, num_streams: int) -> list[int]:
        """One token a stream, other ones in each step."""
        ids = self._ids
        return [ids[(7 * step + stream) % len(ids)] for stream in range(num_streams)]
