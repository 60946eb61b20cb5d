"""Decodes the images of prompts in processes of their own, so that they delay nobody and can be ended.

Each process (`image_worker.py`) decodes one image at a time. An image that takes too long ends with its process.

What must always hold: one tenant's images occupy at most half of the processes; the queue is bounded; when `run` ends,
no process is left.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs
import structlog
import trio

from ..config.engine_config import EngineConfig
from ..messages.images import EncodedImage, ImageFormat, PromptImage
from ..messages.outcomes import ErrorKind, RequestError
from ..shared.fair_queue import FairQueue
from ..shared.image_files import check_room, read_image_format
from ..shared.token_decoding import Decoding
from ..tokenizer.chat_template import RenderedChat
from ..tokenizer.encoder import EncodedChat
from ..tokenizer.encoding_errors import ImageRefused, WorkerUnavailable
from ..tokenizer.image_placeholders import with_images, with_texts
from .child_start import start_child
from .exact_receive import receive_exactly
from .image_worker import LENGTH, PIXELS

log = structlog.get_logger()

MODULE = "quipu.actors.text_workers.image_worker"
MAX_PROCESSES = 2
MAX_PROCESSES_PER_TENANT = MAX_PROCESSES // 2
MAX_WAITING = 8192
MAX_WAITING_BYTES = 256 << 20
MAX_PIXELS = 1 << 25
"""Of one image, as it was sent: 33 million, 100 MB decoded."""
LIMIT_S = 5.0
"""Processor time of one image, many times what the largest needs."""
TIMEOUT_S = 60.0
"""A process gets a tenth of a busy processor, and may have to be started."""
MAX_REASON_BYTES = 1000
MISSING = "this server cannot decode images: Pillow is not installed (pip install 'quipu-llm[images]')"


@attrs.define(eq=False)
class _Job:
    image: EncodedImage
    tenant: str
    done: trio.Event = attrs.field(factory=trio.Event)
    result: bytes | Exception = attrs.field(factory=WorkerUnavailable)
    is_waiting: bool = True


class _Process:
    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self._process = process
        self._stream = stream

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def decode(self, settings: bytes, data: bytes, num_pixel_bytes: int) -> bytes:
        """Return the answer. Raises OSError or EOFError if the process ends, or sends anything else."""
        await self._stream.send_all(LENGTH.pack(len(settings)) + settings + LENGTH.pack(len(data)))
        await self._stream.send_all(data)
        (num_bytes,) = LENGTH.unpack(await receive_exactly(self._stream, LENGTH.size))
        if num_bytes > max(1 + num_pixel_bytes, MAX_REASON_BYTES):
            raise EOFError
        answer = await receive_exactly(self._stream, num_bytes)
        if answer[:1] == PIXELS and num_bytes != 1 + num_pixel_bytes:
            raise EOFError
        return answer

    async def end(self, *, wait_s: float = 0.0) -> int | None:
        """Kill the process, after it had time to end by itself. Return its exit code."""
        code = None
        with trio.CancelScope(shield=True):
            with trio.move_on_after(wait_s):
                await self._process.wait()
            self._process.kill()
            await trio.aclose_forcefully(self._stream)
            code = await self._process.wait()
        return code


class ImagePool:
    def __init__(self, wanted: ImageFormat | None = None) -> None:
        """`wanted`: None if the model reads no images; then there must be none."""
        self.format = wanted
        self._queue: FairQueue[_Job] = FairQueue(MAX_WAITING, MAX_WAITING_BYTES)
        self._num_free = MAX_PROCESSES
        self._idle: list[_Process] = []
        self._nursery: trio.Nursery | None = None
        sizes = {} if wanted is None else attrs.asdict(wanted)
        self._num_pixel_bytes = 0 if wanted is None else len("RGB") * wanted.height * wanted.width
        self._settings = json.dumps({**sizes, "max_pixels": MAX_PIXELS, "limit_s": LIMIT_S}).encode()

    @classmethod
    def of(cls, config: EngineConfig) -> ImagePool:
        """Make the pool for engines. Raises CheckpointError if they cannot read the checkpoint's images."""
        wanted = read_image_format(Path(config.model_path), config.executor)
        check_room(wanted, config.max_num_batched_tokens, config.max_num_seqs)
        return cls(wanted)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep processes as long as they are needed, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            for process in self._idle:
                await process.end()

    async def read(self, images: Sequence[EncodedImage], tenant: str) -> list[PromptImage]:
        """Decode images. Raises ImageRefused, QueueFull and WorkerUnavailable."""
        found = []
        for image in images:
            how = self.format
            assert how is not None
            pixels = await self._read(image, tenant)
            digest = hashlib.sha256(b"quipu-image-1 %d %d " % (how.height, how.width) + pixels).digest()
            found.append(PromptImage(digest, pixels, how.height, how.width, how.num_tokens))
        return found

    def spread(self, rendered: RenderedChat, num_images: int) -> RenderedChat:
        """Return a chat with the texts that the model wants around its images. Raises TemplateError."""
        texts = None if self.format is None or not num_images else self.format.texts
        return rendered if texts is None else with_texts(rendered, num_images, texts)

    def shown(self, decoder: Decoding) -> str:
        """Return what stands for an image in a chat that is tokenized; nothing if there are none."""
        if self.format is None:
            return ""
        texts = self.format.texts
        return decoder.names_of([self.format.placeholder])[0] if texts is None else texts.replacement

    def place(self, encoded: EncodedChat, images: Sequence[PromptImage]) -> EncodedChat:
        """Return a chat with its images. Raises TemplateError."""
        return encoded if self.format is None else with_images(encoded, images, self.format.placeholder)

    async def _read(self, image: EncodedImage, tenant: str) -> bytes:
        if find_spec("PIL") is None:
            raise ImageRefused(_refusal(image, MISSING))
        job = _Job(image, tenant)
        self._queue.put(tenant, job, len(image.data))
        self._dispatch()
        try:
            await job.done.wait()
        finally:
            if job.is_waiting:
                self._queue.drop(tenant, job)
        if isinstance(job.result, bytes):
            return job.result
        raise job.result

    # ------------------------------------------------------------ processes

    def _dispatch(self) -> None:
        """Start decoding as many waiting images as allowed, which goes on even if their clients leave."""
        assert self._nursery is not None
        while self._num_free and (job := self._queue.take(MAX_PROCESSES_PER_TENANT)) is not None:
            self._num_free -= 1
            job.is_waiting = False
            self._nursery.start_soon(self._serve, job)

    async def _serve(self, job: _Job) -> None:
        try:
            job.result = await self._decode(job.image)
        finally:
            self._num_free += 1
            self._queue.done(job.tenant)
            job.done.set()
        self._dispatch()

    async def _take_process(self) -> _Process:
        """Return a process that lives; an idle one may have been killed from outside. Raises OSError, MemoryError."""
        while self._idle:
            process = self._idle.pop()
            if not process.has_ended:
                return process
            log.warning("image_worker.lost", exit_code=await process.end(), help="another is started")
        return _Process(*await start_child(MODULE))

    async def _decode(self, image: EncodedImage) -> bytes | Exception:
        try:
            process = await self._take_process()
        except (OSError, MemoryError) as error:
            log.error("image_worker.not_started", error=type(error).__name__)
            return WorkerUnavailable()
        answer, code = b"", None
        is_usable = False
        try:
            with trio.move_on_after(TIMEOUT_S):
                try:
                    data = image.data.encode("ascii", "replace")
                    answer = await process.decode(self._settings, data, self._num_pixel_bytes)
                    is_usable = True
                except (OSError, EOFError, trio.BrokenResourceError):
                    code = await process.end(wait_s=1.0)
        finally:
            if is_usable:
                self._idle.append(process)
            elif code is None:
                await process.end()
        if is_usable:
            found = answer[1:]
            return found if answer[:1] == PIXELS else ImageRefused(_refusal(image, found.decode("utf-8", "replace")))
        slow = code in (None, -signal.SIGPROF)
        return ImageRefused(_refusal(image, "it takes too long to decode" if slow else "it ends its decoder"))


def _refusal(image: EncodedImage, reason: str) -> RequestError:
    return RequestError(ErrorKind.INVALID, f"Invalid value for `{image.param}`: {reason}.", image.param)
