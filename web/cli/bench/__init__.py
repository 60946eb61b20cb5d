"""`quipu bench serve`: measures the latency, throughput and cached tokens of any OpenAI-compatible server.

A client: it talks HTTP to a server and shares no state with it. `quipu serve` imports nothing from here; `quipu chat`
has its HTTP client, parsing and discovery from here.

    command.py          READ FIRST: from flags to report
    arguments.py        the flags; values.py parses their values
    datasets.py         from flags to a workload
    workload.py         the requests: Ask, Conversation, Workload
    prompts.py          token ids and words, generated from a seed
    generated.py        generated datasets: random, shared-prefix, multi-turn
    files.py            datasets from files: custom, trace
    discovery.py        what the server reports about itself before the run
    load_generator.py   when each conversation starts, and how many run at once
    client.py           one request over HTTP, from sending to its typed outcome
    events.py           parsing of server-sent events
    answer.py           the contents and timing of one streamed response
    report.py           from many outcomes to one set of numbers
    render.py           the report as table and CSV
"""
