"""`quipu audit URL`: does a server tell the truth about its prefix cache?

Everything here is a client. It imports neither the engine nor torch, so it starts fast and can ask any server.
"""
