"""The own API of the server of llama.cpp."""
