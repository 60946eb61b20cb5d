"""The upstreams: other servers that answer requests of this one's clients."""
