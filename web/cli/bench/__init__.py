"""`quipu bench serve`: measures the latency, throughput and cached tokens of any OpenAI-compatible server.

A client: it talks HTTP to a server and shares no state with it. `quipu serve` imports nothing from here; `quipu chat`
has its HTTP client, parsing and discovery from here. READ FIRST: `command.py`.
"""
