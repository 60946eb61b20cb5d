"""Threads and processes that render chats and encode texts for the tokenizer."""
