"""One file for each model family, from config to logits."""
