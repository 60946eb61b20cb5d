"""From flags to a workload: the dataset, the format of its prompts, and when each conversation starts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from .arguments import CHAT
from .files import CustomFile, TraceFile
from .generated import Kind, MultiTurn, RandomPrompts, SharedPrefixes
from .load_generator import arrival_times_s
from .prompts import WORDS, Lengths, TokenRange, Wording
from .workload import Workload

DEFAULT_NUM_PROMPTS = 1000


def takes_ids(arguments: argparse.Namespace) -> bool:
    """Return whether generated prompts are sent as token ids."""
    is_text = arguments.endpoint == CHAT or arguments.dataset_name in ("multi-turn", "custom")
    return not is_text and bool(arguments.prompt_format != "text")


def make_wording(arguments: argparse.Namespace, vocab_size: int | None) -> Wording:
    """Return the workload's wording. `vocab_size` is needed for token ids."""
    is_chat = arguments.endpoint == CHAT
    if not takes_ids(arguments) or vocab_size is None:
        return Wording(TokenRange(0, len(WORDS)), as_ids=False, is_chat=is_chat)
    return Wording(TokenRange.of_vocabulary(vocab_size), as_ids=True, is_chat=is_chat)


def make_random_prompts(arguments: argparse.Namespace, wording: Wording) -> RandomPrompts:
    ratio = arguments.random_range_ratio
    inputs, outputs = Lengths(arguments.random_input_len, ratio), Lengths(arguments.random_output_len, ratio)
    return RandomPrompts(wording, arguments.seed, inputs, outputs)


def make_workload(arguments: argparse.Namespace, wording: Wording) -> Workload:
    """Return the requested dataset. Raises WorkloadError."""
    num_prompts, seed = arguments.num_prompts or DEFAULT_NUM_PROMPTS, arguments.seed
    match arguments.dataset_name:
        case "random":
            return make_random_prompts(arguments, wording).workload(num_prompts)
        case "shared-prefix":
            prefixes = SharedPrefixes(
                wording,
                seed,
                num_prefixes=arguments.shared_prefix_num_prefixes,
                prefix_len=arguments.shared_prefix_prefix_len,
                suffix_len=arguments.shared_prefix_suffix_len,
                output_len=arguments.shared_prefix_output_len,
            )
            return prefixes.workload(num_prompts)
        case "multi-turn":
            prompts, num_turns = make_random_prompts(arguments, wording), arguments.multi_turn_num_turns
            turns = MultiTurn(wording, seed, num_turns, prompts.input_lengths, prompts.output_lengths)
            return turns.workload(num_prompts)
        case "custom":
            file = CustomFile(arguments.dataset_path, wording, arguments.custom_output_len)
            return file.workload(arguments.num_prompts)
        case _:
            trace = TraceFile(
                arguments.dataset_path,
                wording,
                seed,
                block_tokens=arguments.trace_block_tokens,
                speed=arguments.trace_speed,
                scale=arguments.trace_scale,
            )
            return trace.workload(arguments.num_prompts)


def make_arrivals_s(arguments: argparse.Namespace, workload: Workload) -> Sequence[float]:
    """Return the times of the trace, unless a rate is given."""
    if arguments.request_rate is None and workload.arrivals_s is not None:
        return workload.arrivals_s
    rate = math.inf if arguments.request_rate is None else arguments.request_rate
    return arrival_times_s(workload.num_conversations, rate, arguments.burstiness, arguments.seed, Kind.ARRIVALS)
