"""The command line: `quipu serve` and the other commands."""
