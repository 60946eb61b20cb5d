"""Logs, traces, and the lag of the event loop."""
