"""Decisions without I/O: no trio, no torch, no logging. Everything here can be read and tested without a loop."""
