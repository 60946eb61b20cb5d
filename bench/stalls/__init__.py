"""How long one client can delay the others (`python -m bench.stalls`)."""
