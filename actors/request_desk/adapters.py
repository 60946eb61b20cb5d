"""The adapters that are served, by name: loading them into all engines, and unloading them when nothing uses them.

The web layer loads and unloads; each engine's link restores the adapters of a new incarnation before it serves, and
delivers what engines answer. Adapters are told apart by the digest of their files: a name is only a label.

    load    each engine that is ready reads it, and says its digest, which must be the first one's ──▶ served
    unload  the name is gone ──▶ its last request has ended ──▶ every engine forgets the matrices

What must always hold: every engine that serves has every adapter that is served; an adapter that any request uses is
unloaded from no engine; no request uses other bytes than those that the name stood for when it was opened.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping

import attrs
import structlog
import trio

from ..messages.engine_adapters import AdapterLoaded, AdapterMessage, KeepAdapters, LoadAdapter, UnloadAdapter
from .engine_pool import EnginePool, PooledEngine

log = structlog.get_logger()

NAME_RULE = "1 to 128 of the characters A-Z a-z 0-9 . _ : @ / -, the first a letter or a digit"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}"
_NAME = re.compile(NAME_PATTERN)


def is_adapter_name(text: str) -> bool:
    """Return whether an adapter may have this name, which is in logs, metrics and records."""
    return _NAME.fullmatch(text) is not None


class AdapterRefused(Exception):
    """An adapter cannot be loaded; the message says why."""


class UnknownAdapter(Exception):
    """No adapter has this name."""


@attrs.frozen
class Adapter:
    name: str
    folder: str
    digest: str
    """Empty until an engine has read it."""
    created: int
    """When it was loaded, in seconds since 1970."""


@attrs.define(eq=False)
class _Question:
    """A `LoadAdapter` that an engine has not answered."""

    engine: PooledEngine
    adapter: Adapter
    restores: bool
    """It is part of what an incarnation has to load before it serves."""
    answered: trio.Event = attrs.field(factory=trio.Event)
    answer: AdapterLoaded | None = None
    unloaded: set[str] = attrs.field(factory=set)
    """Adapters that the engine has been told to unload since: its answer says nothing of these."""


class Adapters:
    def __init__(
        self,
        pool: EnginePool,
        *,
        max_loras: int,
        modules: Mapping[str, str],
        is_used: Callable[[str], bool],
        until_released: Callable[[], Awaitable[object]],
        note_released: Callable[[], object],
    ) -> None:
        """`modules`: folders by name, to be loaded when the engines start.

        `is_used` says whether a request with an adapter is open or an engine may hold a sequence with it;
        `until_released` waits until that may have changed, or `note_released` was called.
        """
        self._pool = pool
        self._max_loras = max_loras
        now = int(time.time())
        self._served = {name: Adapter(name, folder, "", now) for name, folder in modules.items()}
        self._retiring: dict[str, tuple[Adapter, trio.Event]] = {}
        """By digest: adapters whose last name is gone."""
        self._questions: dict[int, _Question] = {}
        self._next_number = 1
        self._loading = trio.Lock()
        self._is_used, self._until_released, self._note_released = is_used, until_released, note_released
        self.on_changed: Callable[[], object] = lambda: None
        """Called when other adapters are served than before."""
        self.on_lost: Callable[[str, str], object] = lambda digest, reason: None
        """Called with an adapter that an engine could not restore, and why: its requests cannot be served."""

    @property
    def is_enabled(self) -> bool:
        return self._max_loras > 0

    def served(self) -> Mapping[str, Adapter]:
        """Return the adapters that requests may name."""
        return {name: adapter for name, adapter in self._served.items() if adapter.digest}

    def may_use(self, digest: str) -> bool:
        """Return whether a request with this adapter may be opened."""
        return not self.is_enabled or any(adapter.digest == digest for adapter in self._served.values())

    # ------------------------------------------------------------ for the web layer

    async def load(self, name: str, folder: str, *, in_place: bool = False) -> Adapter:
        """Load an adapter into every engine, and serve it under a name; `in_place` replaces what has this name.

        Requests that are open keep the adapter that they were opened with. Raises AdapterRefused, and then nothing has
        changed.
        """
        async with self._loading:
            former = self._served.get(name)
            if former is not None and not in_place:
                raise AdapterRefused(f"An adapter {name} is loaded already.")
            if former is None and len(self._served) >= self._max_loras:
                raise AdapterRefused(f"{self._max_loras} adapters are loaded, which is the most (--max-loras).")
            adapter = Adapter(name, folder, "", int(time.time()))
            try:
                while (engine := self._next_without(adapter)) is not None:
                    answer = await self._ask(engine, adapter)
                    if answer is None:
                        continue  # the engine has ended
                    if answer.error:
                        raise AdapterRefused(answer.error)
                    adapter = attrs.evolve(adapter, digest=answer.digest)
                if not adapter.digest:
                    raise AdapterRefused("No engine is ready to load an adapter. Please try again later.")
            except BaseException:
                self._drop_unless_needed(adapter.digest)
                raise
            # nothing has run since the last engine was found to have it
            self._served[name] = adapter
            if (again := self._retiring.pop(adapter.digest, None)) is not None:
                again[1].set()
            log.info("adapter.loaded", adapter=name, digest=adapter.digest, folder=folder)
            self.on_changed()
            if former is not None and former.digest:
                self._retire(former)
            return adapter

    async def unload(self, name: str) -> None:
        """Serve a name no more, and wait until its last request has ended and it is unloaded from every engine.

        Raises UnknownAdapter.
        """
        adapter = self._served.get(name)
        if adapter is None or not adapter.digest:
            raise UnknownAdapter(name)
        del self._served[name]
        log.info("adapter.unloaded", adapter=name, digest=adapter.digest)
        self.on_changed()
        await self._retire(adapter).wait()

    # ------------------------------------------------------------ for links and supervisors

    def restore(self, engine: PooledEngine) -> list[AdapterMessage]:
        """Return what an incarnation of an engine is told before it serves."""
        self.on_engine_gone(engine)
        if not self.is_enabled:
            return []
        for message in engine.queue.take_nowait():  # what was for the incarnation before is void
            if not isinstance(message, KeepAdapters | LoadAdapter | UnloadAdapter):
                engine.queue.post(message)
        adapters = self._needed()
        known = tuple(adapter.digest for adapter in adapters if adapter.digest)
        return [KeepAdapters(known), *(self._load(engine, adapter, restores=True)[0] for adapter in adapters)]

    def is_restored(self, engine: PooledEngine) -> bool:
        return not any(question.engine is engine and question.restores for question in self._questions.values())

    def answer(self, engine: PooledEngine, message: AdapterLoaded) -> None:
        """Take an engine's answer. Raises AdapterRefused if this engine cannot serve beside others, or at all."""
        question = self._questions.pop(message.number, None)
        if not message.error and (question is None or message.digest not in question.unloaded):
            engine.adapters.add(message.digest)
        if question is not None:
            question.answer = message
            question.answered.set()
        if question is None:
            self._drop_unless_needed(message.digest)
        elif question.restores:
            self._on_restored(question.adapter, message)
            self._drop_unless_needed(message.digest)  # its last name may have gone meanwhile

    def on_engine_gone(self, engine: PooledEngine) -> None:
        """Note that an engine will not answer any more, and has no adapters."""
        engine.adapters.clear()
        for number, question in list(self._questions.items()):
            if question.engine is engine:
                del self._questions[number]
                question.answered.set()

    async def run(self) -> None:
        """Unload adapters that have no name once nothing uses them, until cancelled."""
        while True:
            for digest, (_, unloaded) in list(self._retiring.items()):
                if not self._is_used(digest):
                    del self._retiring[digest]
                    self._drop_unless_needed(digest)
                    unloaded.set()
            await self._until_released()

    # ------------------------------------------------------------ inside

    def _needed(self) -> list[Adapter]:
        """Return one adapter of each digest, or of each folder while that is not known."""
        all_of_them = [*self._served.values(), *(adapter for adapter, _ in self._retiring.values())]
        return list({adapter.digest or adapter.folder: adapter for adapter in all_of_them}.values())

    def _next_without(self, adapter: Adapter) -> PooledEngine | None:
        """Return an engine that has to load an adapter."""
        return next((e for e in self._pool if e.is_ready and adapter.digest not in e.adapters), None)

    async def _ask(self, engine: PooledEngine, adapter: Adapter) -> AdapterLoaded | None:
        """Have an engine load an adapter; return its answer, None if it has ended."""
        message, question = self._load(engine, adapter, restores=False)
        engine.queue.post(message)
        try:
            await question.answered.wait()
        finally:
            self._questions.pop(message.number, None)
        return question.answer

    def _load(self, engine: PooledEngine, adapter: Adapter, *, restores: bool) -> tuple[LoadAdapter, _Question]:
        number, question = self._next_number, _Question(engine, adapter, restores)
        self._next_number += 1
        self._questions[number] = question
        return LoadAdapter(number, adapter.folder, adapter.digest), question

    def _on_restored(self, adapter: Adapter, message: AdapterLoaded) -> None:
        if adapter.digest:
            if message.error:
                self._lose(adapter.digest, message.error)
            return
        if message.error:
            raise AdapterRefused(f"--lora-modules {adapter.name}: {message.error}")
        for name, other in self._served.items():
            if other.folder != adapter.folder or other.digest == message.digest:
                continue
            if other.digest:
                raise AdapterRefused(f"--lora-modules {name}: engines have read different files in {other.folder}")
            self._served[name] = attrs.evolve(other, digest=message.digest)
            log.info("adapter.loaded", adapter=name, digest=message.digest, folder=other.folder)
        self.on_changed()

    def _lose(self, digest: str, reason: str) -> None:
        """Serve an adapter no more that a new incarnation of an engine does not have."""
        for name, adapter in list(self._served.items()):
            if adapter.digest == digest:
                del self._served[name]
                log.error("adapter.lost", adapter=name, digest=digest, reason=reason)
                self._retire(adapter)
        self.on_lost(digest, reason)
        self.on_changed()

    def _retire(self, adapter: Adapter) -> trio.Event:
        """Have an adapter unloaded that has lost a name; return the event of that, or of its having another name."""
        if adapter.digest in self._digests():
            unloaded = trio.Event()
            unloaded.set()
            return unloaded
        _, unloaded = self._retiring.setdefault(adapter.digest, (adapter, trio.Event()))
        self._note_released()
        return unloaded

    def _digests(self) -> set[str]:
        return {adapter.digest for adapter in self._served.values()}

    def _drop_unless_needed(self, digest: str) -> None:
        if not digest or digest in self._digests() or digest in self._retiring:
            return
        for engine in self._pool:
            if digest in engine.adapters:
                engine.adapters.discard(digest)
                engine.queue.post(UnloadAdapter(digest))
                for question in self._questions.values():
                    if question.engine is engine:
                        question.unloaded.add(digest)
