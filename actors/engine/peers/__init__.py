"""Blocks that go from engine to engine."""
