"""What a client may ask about the prefix cache: `/v1/cache/…`."""
