"""`quipu chat`: from flags to exit code, and the loop over what the user enters.

Exit codes: 0 when the user leaves or the input ends, 1 after an error, 2 for invalid flags, 130 if Ctrl-C ended it
without a terminal. Without a terminal the first error ends the chat, since what follows in the input builds on the
answer. Flags shared with `quipu bench serve` have the same names and meanings.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from quipu.actors.config.declarations import Bounds

from ..bench.answer import Failure, Piece
from ..bench.client import Target
from ..bench.discovery import DiscoveryError, find_model
from ..bench.workload import Ask
from ..command_output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, silence
from ..one_line_parser import OneLineParser
from ..server_flags import KEY_VARIABLE, add_server_flags, visible
from ..setting_flags import integer
from .slash_commands import QUIT, ChatHistory, CommandError, Turn, help_text, obey
from .stoppable import ask_until_stopped, run_until_stopped
from .terminal import Terminal, describe_counts, describe_failure


class ChatError(Exception):
    """A line could not be answered. The message is for the user."""


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="quipu chat",
        description="Talk to a served model. The line after each answer says how much of the prompt was cached.",
        epilog=help_text(),
    )
    add = parser.add_argument
    add_server_flags(add)
    add("--model", type=_text, help="model to request (default: the first that GET /v1/models lists)")
    add("--system", type=_text, default="", metavar="TEXT", help="system message (default: none)")
    add("--temperature", type=_temperature, metavar="T", help="sampling temperature (default: the server's)")
    add(
        "--max-tokens",
        type=integer(Bounds(minimum=1)),
        metavar="N",
        help="maximum length of an answer (default: the server's)",
    )
    thinking_help = "send `enable_thinking` to the chat template (default: as the template decides)"
    add("--thinking", action=argparse.BooleanOptionalAction, help=thinking_help)
    return parser


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that the locale could not decode
        raise argparse.ArgumentTypeError("not valid UTF-8") from error
    return text


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `chat`. Returns the exit code."""
    arguments = make_parser().parse_args(argv)
    terminal = Terminal.of(sys.stdin, sys.stdout, sys.stderr, os.environ)
    try:
        key = arguments.api_key or visible(os.environ.get(KEY_VARIABLE, ""))
    except argparse.ArgumentTypeError as error:
        terminal.complain(f"{KEY_VARIABLE}: {error}")
        return EXIT_USAGE
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        model = arguments.model or run_until_stopped(partial(find_model, arguments.base_url, headers))
        if model is None:
            return EXIT_INTERRUPTED
        target = make_target(arguments, model, headers)
        return Chat(arguments.base_url, target, bool(key), terminal, ChatHistory(arguments.system)).run()
    except DiscoveryError as error:
        failure = Failure(error.kind or "", str(error))  # without a kind the message says all
        terminal.complain(describe_failure(failure, arguments.base_url, has_key=bool(key)))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # its reader wants no more
            terminal.complain(f"cannot write the answer: {error.strerror or error}")
        return EXIT_FAILED


def make_target(arguments: argparse.Namespace, model: str, headers: Mapping[str, str]) -> Target:
    fields: dict[str, Any] = {
        "model": model,
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "chat_template_kwargs": None if arguments.thinking is None else {"enable_thinking": arguments.thinking},
    }
    return Target(
        url=f"{arguments.base_url}/v1/chat/completions",
        headers=headers,
        fields={name: value for name, value in fields.items() if value is not None},
        extra_fields={},
        timeout_s=math.inf,  # the user can stop it
    )


@attrs.define(eq=False)
class Chat:
    base_url: str
    target: Target
    has_key: bool
    terminal: Terminal
    history: ChatHistory

    def run(self) -> int:
        """Answer line by line until the user leaves; return the exit code."""
        if self.terminal.is_interactive:
            self.terminal.note(f"{self.target.fields['model']} at {self.base_url}; /help lists the commands")
        while (line := self._read_line()) is not None and line.strip() != QUIT:
            try:
                if line.startswith("/"):
                    self.terminal.note(obey(line, self.history))
                elif line.strip():
                    self._answer(line)
            except (ChatError, CommandError) as error:
                self.terminal.complain(str(error))
                if not self.terminal.is_interactive:
                    return EXIT_FAILED
        return 0

    def _read_line(self) -> str | None:
        try:
            return self.terminal.read_line()
        except KeyboardInterrupt:
            self.terminal.leave_prompt()
            if self.terminal.is_interactive:
                return None
            raise

    def _answer(self, question: str) -> None:
        """Print the answer as it arrives, then its counts. Raises ChatError. A stopped answer stays in the history."""
        texts: list[str] = []

        def take(piece: Piece) -> None:
            if not piece.is_reasoning:
                texts.append(piece.text)
            self.terminal.show(piece)

        outcome = ask_until_stopped(self.target, Ask({"messages": self.history.messages(question)}), take)
        self.terminal.end_answer(is_stopped=outcome is None)
        if outcome is not None and outcome.failure is not None:
            raise ChatError(describe_failure(outcome.failure, self.base_url, has_key=self.has_key))
        if outcome is None and not self.terminal.is_interactive:
            raise KeyboardInterrupt
        if texts or outcome is not None:
            self.history.turns.append(Turn(question, "".join(texts)))
        self.terminal.note("stopped" if outcome is None else describe_counts(outcome))
