"""The command line: `quipu serve`, and the commands beside it."""
