"""`quipu bench serve`: asks any OpenAI-compatible server many questions, and says how fast and how cached it answered.

A client: it talks HTTP to a server and shares no state with one. Nothing of `quipu serve` imports it.

    command.py      READ FIRST: from flags to report
    arguments.py    the flags; values.py what they may say
    datasets.py     from flags to a workload
    workload.py     what is asked: Ask, Conversation, Workload
    prompts.py      token ids and words, drawn from a seed
    generated.py    datasets that are drawn: random, shared-prefix, multi-turn
    files.py        datasets that are read: custom, trace
    discovery.py    what the server says about itself before the run
    load.py         when each conversation begins, and how many run at once
    client.py       one request over HTTP, from sending to its typed outcome
    events.py       server-sent events out of bytes
    answer.py       what one streamed answer said, and when
    report.py       many outcomes to one set of numbers
    render.py       those as table, JSON and CSV
"""
