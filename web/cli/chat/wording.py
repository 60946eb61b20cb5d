"""What the user is told about an answer: its counts, or in one sentence why there is none."""

from __future__ import annotations

from ..bench.answer import Failure, Outcome


def describe_counts(outcome: Outcome) -> str:
    """Return the line of counts. What the server did not report is left out."""
    usage = outcome.usage
    parts = []
    if usage.prompt_tokens is not None:
        parts.append(f"prompt {usage.prompt_tokens:,}")
        if usage.cached_tokens is not None:
            parts += [f"cached {usage.cached_tokens:,}", f"computed {usage.prompt_tokens - usage.cached_tokens:,}"]
    if usage.completion_tokens is not None:
        parts.append(f"output {usage.completion_tokens:,}")
    if outcome.first_token_s is not None:
        parts.append(f"first token {1000 * (outcome.first_token_s - outcome.started_s):,.0f} ms")
    if outcome.finish_reason == "length":
        parts.append("cut off at the maximum length")
    return " · ".join(parts)


def describe_failure(failure: Failure, base_url: str, *, has_key: bool) -> str:
    """Return what went wrong and what the user can do about it."""
    match failure.kind:
        case "connect":
            return (
                f"no server at {base_url}: start one with `quipu serve` or `make serve`, or name another with "
                f"--base-url ({failure.message})"
            )
        case "http_401" if has_key:
            return f"{base_url} does not accept this key: check --api-key or OPENAI_API_KEY"
        case "http_401":
            return f"{base_url} requires a key: give --api-key or set OPENAI_API_KEY"
        case "http_404":
            return f"{failure.message} (404 from {base_url}; check --model and --base-url)"
        case "error_event":
            return f"the server ended the answer with an error: {failure.message}"
        case "stream_cut" | "stream_ended_early":
            return f"the answer broke off: {failure.message}"
        case "disconnected":
            return f"{base_url} closed the connection without an answer: {failure.message}"
        case "not_a_stream":
            return f"{base_url} did not answer with a stream: {failure.message}"
        case "":
            return failure.message
    return f"{failure.kind.replace('http_', 'HTTP ')}: {failure.message}"
