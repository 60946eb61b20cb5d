"""One engine: its process, and the three actors that schedule, manage KV blocks and run the model."""
