"""Shared fixtures: small houses on the fake executor, in one loop on a mock clock."""

from __future__ import annotations
