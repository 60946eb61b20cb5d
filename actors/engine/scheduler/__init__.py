"""The scheduler: continuous batching over a paged KV cache."""
