"""Endpoints that explain the prefix cache, `/v1/cache/…`."""
