"""HTTP/1.1: sockets, connections, and streams to clients. Independent of the APIs."""
