"""The program of a process that renders chats: it receives one chat template, then one chat after the other.

`chat_process.py` starts it, talks to it over its standard input, a socket, and kills it. A template ships with a
checkpoint, may loop forever or write without end, and Jinja never releases the GIL: so it runs only here.

What must always hold, whatever the template does: this process ends when its parent ends or is killed, and when a chat
takes too long; it never uses more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import jinja2

from ..fleet.processes.child import become_child
from ..messages.prompts import ChatPrompt
from ..tokenizer.chat_template import INVALID_UNICODE, ChatTemplate, ChatTooLong, TemplateError
from .chat_wire import ChatAnswer, pack_answer, read_chat, read_source

MEMORY_BYTES = 1 << 30
"""Address space of one process: a few times the largest request body and chat."""
GRACE_S = 1.0
"""Added to the time limit of a chat: the parent kills this process at the limit, the kernel a little later."""


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    link, read = become_child(MEMORY_BYTES)
    try:
        source, timeout_s = read_source(read)
        with _alarm(timeout_s):
            try:
                template = ChatTemplate(
                    source.source, source.variables, source.tool_source, lists_parts=source.lists_parts
                )
            except Exception as error:
                link.sendall(pack_answer(ChatAnswer.REFUSED, _reason(error)))
                return
        link.sendall(pack_answer(ChatAnswer.READY))
        while True:
            chat, max_characters = read_chat(read)
            with _alarm(timeout_s):
                answer = _render(template, chat, max_characters)
            del chat
            link.sendall(answer)
            del answer
    except (EOFError, OSError):
        pass  # the parent is gone


def _render(template: ChatTemplate, chat: ChatPrompt, max_characters: int) -> bytes:
    try:
        rendered = template.render(chat, max_characters)
        return pack_answer(ChatAnswer.RENDERED, rendered.text, rendered.mark_ends, rendered.part_ends)
    except TemplateError as error:
        return pack_answer(ChatAnswer.REFUSED, str(error))
    except ChatTooLong as error:
        return pack_answer(ChatAnswer.TOO_LONG, str(error.num_characters))
    except UnicodeEncodeError:
        return pack_answer(ChatAnswer.REFUSED, INVALID_UNICODE)
    except MemoryError:
        return pack_answer(ChatAnswer.REFUSED, "The chat template ran out of memory for these messages.")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes too long, whatever it runs."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
