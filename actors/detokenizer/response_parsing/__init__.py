"""What a model's output means: a pure parser from tokens to text, reasoning and tool calls.

At start the server chooses a `ResponseTemplate` (`parser_choice.py`) from the checkpoint's own `response_template`, a
parser's name, or the chat template. The detokenizer then creates one `ResponseParser` (`response_parser.py`) per
sequence. What must always hold: nothing here waits or keeps state between sequences, and the cost per character and the
state per sequence are bounded, whatever the model writes.
"""
