"""From a row of logits to a token and its logprobs: the oracle that every backend agrees with."""
