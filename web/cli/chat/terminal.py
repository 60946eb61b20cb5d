"""Reading lines and printing answers, with a terminal and without, and what is said of an answer.

Standard output gets the answers and nothing else. Reasoning, counts, notices and errors go to standard error, dimmed if
that has colours; both are the same screen then. What must always hold: no control character of a server reaches a
terminal, which would obey it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Final, TextIO

import attrs

from quipu.actors.shared.terminals import has_colors

from ..bench.answer import Failure, Outcome, Piece

PROMPT: Final = "> "
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
_HARMLESS: Final = dict.fromkeys((*range(32), *range(127, 160)), "�") | {
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}


@attrs.define(eq=False)
class Terminal:
    _input: TextIO
    _output: TextIO
    _errors: TextIO
    _can_dim: bool
    is_interactive: bool
    """Whether somebody types and reads."""
    _shown: Piece | None = None

    @classmethod
    def of(cls, stdin: TextIO, stdout: TextIO, stderr: TextIO, environment: Mapping[str, str]) -> Terminal:
        """Return a terminal on the process's streams, which from now on replace what they cannot encode or decode."""
        for stream in (stdin, stdout, stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        is_interactive = stdin.isatty() and stdout.isatty()
        if is_interactive:
            with suppress(ImportError):
                import_module("readline")  # from now on `input` edits lines and recalls them
        return cls(stdin, stdout, stderr, has_colors(stderr, environment), is_interactive)

    def read_line(self) -> str | None:
        """Return the next line without its end, or None if there is none. Prompts if somebody types."""
        if not self.is_interactive:
            line = self._input.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(PROMPT)
        except EOFError:
            self._write(self._output, "\n")
            return None

    def show(self, piece: Piece) -> None:
        """Print a piece of an answer at once."""
        if self._shown is not None and self._shown.is_reasoning and not piece.is_reasoning:
            self.end_answer()
        self._shown = piece
        if piece.is_reasoning:
            self._write(self._errors, self._dimmed(piece.text))
        else:
            self._write(self._output, _harmless(piece.text) if self._output.isatty() else piece.text)

    def end_answer(self, *, is_stopped: bool = False) -> None:
        """End the line of an answer; of a stopped one also if it is empty, since the terminal has shown `^C`."""
        shown = self._shown
        if (is_stopped and self.is_interactive) or (shown is not None and not shown.text.endswith("\n")):
            self._write(self._errors if shown is not None and shown.is_reasoning else self._output, "\n")
        self._shown = None

    def note(self, text: str) -> None:
        self._write(self._errors, self._dimmed(text) + "\n")

    def complain(self, message: str) -> None:
        self._write(self._errors, f"quipu: {_harmless(' '.join(message.split()))}\n")

    def leave_prompt(self) -> None:
        """End the line of a prompt that was interrupted."""
        if self.is_interactive:
            self._write(self._output, "\n")

    def _dimmed(self, text: str) -> str:
        return f"{_DIM}{_harmless(text)}{_NORMAL}" if self._can_dim else _harmless(text)

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()  # two streams may be one screen


def _harmless(text: str) -> str:
    return text.translate(_HARMLESS)


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
