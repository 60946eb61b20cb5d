"""`quipu doctor`: what this machine can do, and what to fix before a server runs on it."""
