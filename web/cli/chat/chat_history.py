"""What is sent with each question: the system message, with documents, and the turns so far.

What must always hold: a request begins with the messages of the one before it, unless the user has changed the system
message or started a new chat. That is why a server finds its beginning in the prefix cache.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Turn:
    question: str
    answer: str


@attrs.define(eq=False)
class ChatHistory:
    system: str = ""
    documents: dict[str, str] = attrs.field(factory=dict)
    """Texts by name, in the order in which they were added."""
    turns: list[Turn] = attrs.field(factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the messages of a request that asks `question`."""
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
