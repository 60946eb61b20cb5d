"""The detokenizer: from token ids to the text that a client reads."""
