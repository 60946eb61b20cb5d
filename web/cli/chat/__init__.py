"""`quipu chat`: a chat in the terminal with any OpenAI-compatible server, which shows what each turn found cached.

A client, like `quipu bench serve`, from which it has its HTTP client: it shares no state with a server, and
`quipu serve` imports nothing from here. READ FIRST: `chat_command.py`.
"""
