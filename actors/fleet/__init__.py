"""Engines and upstreams, however many: they are started, watched, added, removed and reached from here."""
