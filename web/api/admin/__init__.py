"""Operators' endpoints: health, metrics, settings, usage reports."""
