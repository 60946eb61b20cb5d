"""A checkpoint's tokenizer for tests: encoder, decoder and chat template, loaded as `wiring.py` loads them."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from quipu.actors.detokenizer.decoder import Decoder
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.tokenizer.encoder import load_encoder
from quipu.actors.tokenizer.template_source import read_template


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self.library = load_library(folder)
        self.template = read_template(folder)
        self.encoder = load_encoder(self.library)
        self.decoder = Decoder(self.library)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizers library's object, as the reference."""
        return self.library.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with the special tokens that the tokenizer adds."""
        return self.library.list_ids(text)
