"""A process that renders chats: it is given one chat template, and chats one after the other, over its standard input.

Started and killed by `chat_pool.py`. A template comes with a checkpoint, may loop for ever or write without end, and
Jinja never lets go of the interpreter lock: so it runs here and nowhere else.

What must always hold, whatever the template does: this process ends when its parent does (also a killed one) and when
a chat takes longer than it may; it never has more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import signal

import jinja2

from ..messages.prompts import ChatPrompt
from ..processes.child import become_child
from ..tokenizer.chat_template import NO_UNICODE, ChatTemplate, TemplateError, TooMuchText
from .chat_wire import Kind, pack_answer, read_chat, read_source

MEMORY_BYTES = 1 << 30
"""Address space of one worker: a few times the longest body and what is made of it."""
GRACE_S = 1.0
"""Beyond the time that a chat may take: the parent kills at that time, the kernel a little later."""


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    link, read = become_child(MEMORY_BYTES)
    try:
        source, timeout_s = read_source(read)
        with _Alarm(timeout_s):
            try:
                template = ChatTemplate(source.source, source.variables)
            except Exception as error:
                link.sendall(pack_answer(Kind.REFUSED, _reason(error)))
                return
        link.sendall(pack_answer(Kind.READY))
        while True:
            chat, max_characters = read_chat(read)
            with _Alarm(timeout_s):
                answer = _render(template, chat, max_characters)
            del chat
            link.sendall(answer)
            del answer
    except (EOFError, OSError):
        pass  # the parent has gone


def _render(template: ChatTemplate, chat: ChatPrompt, max_characters: int) -> bytes:
    try:
        rendered = template.render(chat, max_characters)
        return pack_answer(Kind.RENDERED, rendered.text, rendered.mark_ends)
    except TemplateError as error:
        return pack_answer(Kind.REFUSED, str(error))
    except TooMuchText as error:
        return pack_answer(Kind.TOO_MUCH, str(error.num_characters))
    except UnicodeEncodeError:
        return pack_answer(Kind.REFUSED, NO_UNICODE)
    except MemoryError:
        return pack_answer(Kind.REFUSED, "the chat template takes too much memory for these messages")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


class _Alarm:
    """Has the kernel end this process if the block takes too long, whatever runs in it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s + GRACE_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
