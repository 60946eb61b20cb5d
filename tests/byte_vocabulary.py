"""Run grammars through llguidance, before a vocabulary of bytes and a few longer tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from quipu.actors.grammars.grammar_library import GrammarError

_CLOSERS = frozenset(b'"}]>/<\n')


class ByteVocabulary:
    """One token for each byte, the longer tokens after them, and a last one that ends an output."""

    bos_token_id = None

    def __init__(self, added: Sequence[str] = (), special: Sequence[str] = ()) -> None:
        self.added = {text: 256 + number for number, text in enumerate(added)}
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in added), b"<|eos|>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*(self.added[text] for text in special), self.eos_token_id]
        self._tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), slices=[])

    def __call__(self, text: str | bytes) -> list[int]:
        """Return bytes as tokens, as llguidance asks for."""
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text: str) -> list[int]:
        """Return text as a model would write it: longer tokens are never written byte by byte."""
        parts = re.split(f"({'|'.join(map(re.escape, self.added))})", text) if self.added else [text]
        return [token for part in parts for token in ([self.added[part]] if part in self.added else part.encode())]

    def matcher(self, grammar: str) -> LLMatcher:
        found = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not found.is_error(), f"{found.get_error()}\n{grammar}"
        return found

    def check(self, grammar: str) -> None:
        """Raise GrammarError for a grammar that the library does not support, or that allows no output."""
        found = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if found.is_error() or not any(found.compute_bitmask()):
            raise GrammarError(found.get_error())

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether the whole text matches."""
        matcher, tokens = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def begins(self, grammar: str, text: str) -> bool:
        """Return whether an output may begin with the text."""
        tokens = self.encode(text)
        return self.matcher(grammar).try_consume_tokens(tokens) == len(tokens)

    def walk(self, grammar: str, random: Random, max_tokens: int = 2_000) -> list[int] | None:
        """Return an output that a model which knows nothing writes under the grammar's mask, None if it is too long."""
        matcher = self.matcher(grammar)
        output: list[int] = []
        for _ in range(max_tokens):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [token for token in range(len(self.tokens)) if mask >> token & 1]
            assert allowed, bytes(b"".join(self.tokens[token] for token in output))
            closers = [token for token in allowed if token in _CLOSERS or token >= len(self.tokens) - 1]
            token = random.choice(closers if closers and random.random() < 0.4 else allowed)
            if token == self.eos_token_id:
                return output
            assert matcher.consume_token(token)
            output.append(token)
        return None
