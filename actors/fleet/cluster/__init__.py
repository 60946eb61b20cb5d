"""Engines on other machines: who starts and watches them there, how they reach their web process, and
how a node gets the checkpoint that they serve."""
