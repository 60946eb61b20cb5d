"""The KV-block manager: what each step may use of the KV cache, and what of a prompt is cached."""
