"""The OpenAI APIs: completions, chat completions, responses, models."""
