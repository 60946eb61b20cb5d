"""The mover: copies blocks of the KV cache between the device and other tiers."""
