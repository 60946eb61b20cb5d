"""vLLM's names of our metrics, for dashboards and alerts that were made for it (`--metric-names vllm`).

Used by the endpoint of metrics on the text that it sends. What must always hold: a series under vLLM's name has the
labels and the value of ours, beside which it stands; a metric that means something else has no such name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

OWN_NAMES, VLLM_NAMES = "quipu", "vllm"
"""Values of the flag."""
NAMES: Final[Mapping[str, str]] = {
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "num_preemptions_total": "num_preemptions_total",
    "spec_decode_num_drafts_total": "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total": "spec_decode_num_accepted_tokens_per_pos_total",
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "requests_ended_total": "request_success_total",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_max_num_generation_tokens": "request_max_num_generation_tokens",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
}
"""Our names of families and vLLM's, both without their prefixes."""
_OURS, _THEIRS = "quipu:", "vllm:"
_PARTS: Final = ("", "_bucket", "_count", "_sum")


def with_vllm_names(text: bytes) -> bytes:
    """Return metrics in Prometheus's text format, and after them those that vLLM has, under its names."""
    return text + "".join(f"{line}\n" for line in _renamed(text.decode())).encode()


def _renamed(text: str) -> Iterator[str]:
    names = {ours + part: theirs + part for ours, theirs in NAMES.items() for part in _PARTS}
    for line in text.splitlines():
        comment = line[:7] if line.startswith(("# HELP ", "# TYPE ")) else ""
        name, sign, rest = _split(line.removeprefix(comment).removeprefix(_OURS))
        if name in names:
            yield f"{comment}{_THEIRS}{names[name]}{sign}{rest}"


def _split(line: str) -> tuple[str, str, str]:
    """Return a line's name, the character after it, and the rest."""
    end = next((at for at, character in enumerate(line) if character in "{ "), len(line))
    return line[:end], line[end : end + 1], line[end + 1 :]
