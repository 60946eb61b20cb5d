"""Threads and processes to which the tokenizer hands whatever grows with a prompt."""
