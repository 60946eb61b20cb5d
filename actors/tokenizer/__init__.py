"""The tokenizer: from prompts to sequences of token ids with block keys."""
