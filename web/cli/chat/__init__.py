"""`quipu chat`: a chat in the terminal with any OpenAI-compatible server, which shows what each turn found cached.

A client, like `quipu bench serve`, from which it has its HTTP client: it shares no state with a server, and
`quipu serve` imports nothing from here.

    chat_command.py     READ FIRST: from flags to exit code, and the loop over what the user enters
    slash_commands.py   what is sent with each question; `/reset`, `/system`, `/file` and `/help`, which change it
    stoppable.py        one answer over HTTP, until it ends or the user stops it
    terminal.py         reading lines and printing answers, with a terminal and without
    wording.py          the line of counts, and errors in one sentence
"""
