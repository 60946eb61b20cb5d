"""The APIs: bodies in, answers out, the same request life for all of them."""
