"""The executor: runs passes on a backend and records what the blocks contain."""
