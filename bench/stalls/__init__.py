"""How long one client can make the others wait (`python -m bench.stalls`)."""
