"""The executor: runs forward passes on a backend and records what the blocks contain."""
