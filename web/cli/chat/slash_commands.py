"""What is sent with each question, and the commands that change it. Each command returns what to tell the user.

`/quit` is only listed here: the loop in `chat_command.py` ends at it.

What must always hold: a request begins with the messages of the one before it, unless the user has changed the system
message or started a new chat. That is why a server finds its beginning in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

QUIT: Final = "/quit"


@attrs.frozen
class Turn:
    question: str
    answer: str


@attrs.define(eq=False)
class ChatHistory:
    system: str = ""
    documents: dict[str, str] = attrs.field(factory=dict)
    turns: list[Turn] = attrs.field(factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        messages = []
        if system := self._system_message():
            messages.append({"role": "system", "content": system})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": question}]

    def _system_message(self) -> str:
        documents = [f'<document name="{name}">\n{text}\n</document>' for name, text in self.documents.items()]
        return "\n\n".join([*([self.system] if self.system else []), *documents])


class CommandError(Exception):
    """A command cannot be obeyed. The message says why; the history is unchanged."""


@attrs.frozen
class Command:
    usage: str
    help: str
    obey: Callable[[ChatHistory, str], str]


def obey(line: str, history: ChatHistory) -> str:
    """Obey a line that starts with a slash; return what to tell the user. Raises CommandError."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        raise CommandError(f"unknown command {name}; /help lists them, and a space before the slash makes it text")
    return COMMANDS[name].obey(history, rest.strip())


def help_text() -> str:
    rows = [(command.usage, command.help) for command in COMMANDS.values()]
    rows.append((QUIT, "leave; also Ctrl-D, or Ctrl-C at the prompt"))
    lines = [f"  {usage:<14}{text}" for usage, text in rows]
    return "\n".join(["in the chat:", *lines, "While an answer streams, Ctrl-C stops it."])


def _reset(history: ChatHistory, rest: str) -> str:
    history.turns.clear()
    return "new chat"


def _set_system(history: ChatHistory, text: str) -> str:
    history.system = text
    return "system message set" if text else "system message removed"


def _add_file(history: ChatHistory, name: str) -> str:
    if not name:
        history.documents.clear()
        return "documents removed"
    try:
        path = Path(name).expanduser()
        if not path.is_file():  # a device would never end
            raise CommandError(f"{name} is not a file" if path.exists() else f"there is no file {name}")
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not a text file in UTF-8") from error
    except (OSError, RuntimeError, ValueError) as error:  # the last two for an unknown ~user and for a NUL
        raise CommandError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    history.documents[name] = text
    return f"{name}: {len(text):,} characters in the system message"


def _help(history: ChatHistory, rest: str) -> str:
    return help_text()


COMMANDS: Final = {
    "/reset": Command("/reset", "start a new chat with the same system message and documents", _reset),
    "/system": Command("/system TEXT", "set the system message; without TEXT, remove it", _set_system),
    "/file": Command("/file PATH", "add a text file to the system message; without PATH, remove all", _add_file),
    "/help": Command("/help", "show this list", _help),
}
