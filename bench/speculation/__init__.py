"""Speculative decoding: what it finds in texts that repeat, and what it is worth."""
