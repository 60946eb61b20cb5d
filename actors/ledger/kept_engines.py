"""SQLAlchemy engines that readers of the ledger use one after another, so that statements are compiled once.

Used by `reading.py`. Compiling took two thirds of a small report's time.

What must always hold: no two readers share an engine, and an engine that nobody uses has no connection.
"""

from __future__ import annotations

import sqlalchemy as sa

from .database import make_engine


class KeptEngines:
    """Engines by URL. May be used from several threads."""

    def __init__(self) -> None:
        self._idle: dict[str, list[sa.Engine]] = {}

    def take(self, url: str) -> sa.Engine:
        """Return an engine that nobody else has. Raises LedgerError."""
        try:
            return self._idle[url].pop()
        except (KeyError, IndexError):
            return make_engine(url, reads_only=True)

    def give_back(self, url: str, engine: sa.Engine) -> None:
        """Close an engine's connections and keep it for the next reader."""
        engine.dispose()
        self._idle.setdefault(url, []).append(engine)
