"""Engines on other machines: how a node gets the checkpoint that they serve."""
