"""One engine: its process, and the actors that schedule, manage KV blocks, run the model and move blocks."""
