"""Benchmarks, most of them against a peer; each module is a command. Not part of the installed package."""
