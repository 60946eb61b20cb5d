"""What outputs of a grammar cost, and whether they are valid (`python -m bench.structured`)."""
