"""Grammars of outputs: schemas and calls as text for the library, what is refused, and who waits for a grammar."""
