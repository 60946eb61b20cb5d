"""The process that speaks to Ray for a web process: `python -P -m quipu.actors.fleet.cluster.ray_driver`.

Its standard input is a socket to the web process, `ray_link.py`, which gives commands (`ray_messages.py`). It is a
process of its own because of Ray's threads, its signal handlers and its sudden exits when a cluster breaks. Each engine
has a thread here, which places its `Keeper` as a Ray actor and waits for its end.

What must always hold: each `Start` is answered by one `Ended`, unless this process ends first; when the web process
ends, so does this one, and with it every keeper and engine that it has started.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec

from ...shared.checkpoint import CheckpointError
from .checkpoint_finder import Wanted, describe_wanted
from .keeper import Keeper
from .placement import Placement, default_resources
from .ray_messages import (
    Command,
    End,
    Ended,
    Ending,
    EngineOrder,
    Event,
    Failed,
    Forget,
    Join,
    Joined,
    Kill,
    Placed,
    Start,
)
from .ray_pieces import import_ray, start_ray_source
from .shipping import PieceSource

KILL_S = 3.0
"""How long a keeper may take to kill its engine, before Ray kills the keeper."""
SHUTDOWN_S = 3.0
REACH_S = 5.0
MAX_CONCURRENCY = 4
"""Calls of a keeper at one time: `wait`, and others while it waits."""


class Unwanted(Exception):
    """The engine is not to be started any more."""


@attrs.define(eq=False)
class KeptEngine:
    _ray: Any
    _order: EngineOrder
    _placement: Placement
    _wanted: Wanted
    _source: PieceSource | None
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _keeper: Any = attrs.field(default=None, init=False)
    _is_unwanted: bool = attrs.field(default=False, init=False)

    def place(self) -> tuple[str, int]:
        """Start the keeper once a node has room for it. Returns the node, and the number of engines on it."""
        options, num_sharing = self._placement.wait(self._order.engine_id, self._check)
        with self._lock:
            self._check()
            actor = self._ray.remote(Keeper)
            self._keeper = actor.options(
                name=f"quipu-engine-{self._order.engine_id}-incarnation-{self._order.incarnation}",
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=MAX_CONCURRENCY,
                **options,
            ).remote()
        return self._placement.node_of(self._order.engine_id), num_sharing

    def run(self, num_sharing: int) -> Ending:
        """Have the keeper start the process, and wait until that has ended. Raises Ray's errors."""
        self._ray.get(self._keeper.start.remote(self._order, num_sharing, self._wanted, self._source))
        ending: Ending = self._ray.get(self._keeper.wait.remote())
        return ending

    def end(self) -> None:
        """Have the process told to end, or do not start it."""
        with self._lock:
            self._is_unwanted = True
            if self._keeper is not None:
                self._keeper.end.remote()

    def kill(self) -> None:
        """Have the process killed, by its keeper if that answers, else by ending the keeper."""
        with self._lock:
            self._is_unwanted = True
            if self._keeper is not None:
                self._keeper.kill.remote()
                timer = threading.Timer(KILL_S, self.drop)
                timer.daemon = True
                timer.start()

    def drop(self) -> None:
        """End the keeper, and with it the process if there still is one."""
        if self._keeper is not None:
            self._ray.kill(self._keeper)

    def _check(self) -> None:
        if self._is_unwanted:
            raise Unwanted


class RayDriver:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._ray: Any = None
        self._placement: Placement
        self._wanted: Wanted
        self._source: PieceSource | None = None
        self._engines: dict[int, KeptEngine] = {}

    def run(self) -> None:
        """Obey commands until the web process is gone."""
        decoder = msgspec.json.Decoder(Command)
        for line in self._link.makefile("rb"):
            match decoder.decode(line):
                case Join() as join:
                    try:
                        self._join(join)
                    except Exception as error:
                        self._send(Failed(first_line(error)))
                        return
                case Start(order):
                    engine = KeptEngine(self._ray, order, self._placement, self._wanted, self._source)
                    self._engines[order.incarnation] = engine
                    threading.Thread(target=self._keep, args=(engine, order.incarnation), daemon=True).start()
                case End(incarnation) if incarnation in self._engines:
                    self._engines[incarnation].end()
                case Kill(incarnation) if incarnation in self._engines:
                    self._engines[incarnation].kill()
                case Forget(engine_id):
                    self._placement.forget(engine_id)
                case _:
                    pass  # it has ended

    def close(self) -> None:
        """Leave the cluster: Ray ends every keeper of this driver."""
        if self._ray is not None:
            self._ray.shutdown()

    def _join(self, join: Join) -> None:
        self._ray = import_ray()
        address = join.address or os.environ.get("RAY_ADDRESS")
        if address and (absent := nobody_at(address)):
            raise RuntimeError(f"cannot join the Ray cluster at {address}: {absent}")
        local = {} if address else {"include_dashboard": False}
        with quiet_errors() as said:
            try:
                self._ray.init(
                    address=address,
                    namespace=f"quipu-{secrets.token_hex(4)}",  # names of keepers are this server's alone
                    log_to_driver=False,
                    logging_level="ERROR",
                    **local,
                )
            except Exception as error:
                raise RuntimeError(
                    f"cannot join the Ray cluster at {address or 'this machine'}: {first_line(error)}"
                    + (f" ({said()})" if said() else "")
                ) from error
        self._wanted = describe_wanted(join.model, Path(join.model_path))
        if join.ships_weights:
            self._source = start_ray_source(Path(join.model_path))
        resources = join.resources or default_resources(self._ray.cluster_resources(), join.gpus_each)
        self._placement = Placement(self._ray, resources, join.strategy, join.num_engines)
        num_nodes = sum(node["Alive"] for node in self._ray.nodes())
        self._send(Joined(self._ray.util.get_node_ip_address(), num_nodes, self._placement.resources))

    def _keep(self, engine: KeptEngine, incarnation: int) -> None:
        try:
            node, num_sharing = engine.place()
            self._send(Placed(incarnation, node))
            ending = engine.run(num_sharing)
        except Unwanted:
            ending = Ending(reason="it was not started: it is not wanted any more")
        except Exception as error:
            ending = self._explain(error)
        del self._engines[incarnation]
        self._send(Ended(incarnation, ending))
        engine.drop()

    def _explain(self, error: Exception) -> Ending:
        errors = self._ray.exceptions
        if isinstance(error, errors.ActorUnschedulableError | errors.RuntimeEnvSetupError):
            return Ending(reason=f"Ray cannot place it: {first_line(error)}", is_hopeless=True)
        if isinstance(error, CheckpointError):
            return Ending(reason=first_line(error), is_hopeless=True)
        if isinstance(error, errors.RayActorError):
            text = str(error)
            if "ModuleNotFoundError" in text or "No module named" in text:
                return Ending(reason="quipu is not installed on its node, or another version of it", is_hopeless=True)
            return Ending(reason=f"its Ray actor died: {cause_of(text)}")
        return Ending(reason=f"its keeper could not start it: {first_line(error)}")

    def _send(self, event: Event) -> None:
        with self._sending, suppress(OSError):  # the web process is gone, which `run` notices
            self._link.sendall(msgspec.json.encode(event) + b"\n")


def nobody_at(address: str) -> str:
    """Return why `HOST:PORT` cannot be reached, empty if it can. Ray itself would try for a minute or more."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return ""  # a name that Ray knows, such as `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        return str(error)
    return ""


def first_line(error: BaseException) -> str:
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cause_of(text: str) -> str:
    """Return the line of an actor's death that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = next((line for line in lines if "because" in line), lines[0] if lines else "")
    return cause.partition(" Some common causes")[0]


@contextmanager
def quiet_errors() -> Iterator[Any]:
    """Keep what is written to standard error while the block runs; yields a function that returns its last line."""
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def last_line() -> str:
            kept.seek(0)
            lines = kept.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""

        try:
            yield last_line
        finally:
            os.dup2(before, 2)
            os.close(before)


def main() -> None:
    driver = RayDriver(socket.socket(fileno=os.dup(0)))
    try:
        driver.run()
    finally:
        late = threading.Timer(SHUTDOWN_S, os._exit, (0,))
        late.daemon = True
        late.start()
        driver.close()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
