"""HTTP/1.1: sockets, connections, and streams on their way to clients. Knows no API."""
