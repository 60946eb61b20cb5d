"""What both servers of `bench.sse` stream: the same tokens in the same steps, each with a text of its own."""

from __future__ import annotations

from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import load_library


class TokenSource:
    """Ids of plain words: an incomplete character would not produce an event."""

    def __init__(self) -> None:
        library = load_library(DEMO)
        texts = {i: library.tokenizer.decode([i]) for i in range(300, library.tokenizer.get_vocab_size())}
        self._ids = [i for i, text in texts.items() if text.isascii() and text.strip().isalpha()]

    def of_step(self, step: int, num_streams: int) -> list[int]:
        """Return one token per stream; they differ from step to step."""
        ids = self._ids
        return [ids[(7 * step + stream) % len(ids)] for stream in range(num_streams)]
