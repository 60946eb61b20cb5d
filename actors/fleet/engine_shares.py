"""Divides the machine among the engines of one server: processors, GPUs, memory, and addresses of KV events.

`process_host.local_hosts` asks it for the configuration and the environment of each engine process. The machine is cut
into slots when the server starts, one for each engine that it may have with its load (`--max-engines`); engine k gets
slot k. An engine that is added later gets a slot that no other engine has, or else shares one with the fewest engines.

Memory. What is free changes while engines load, and a cache that is hardly used still counts as free. So free memory is
measured once, before the first engine is started, and each engine's share of it, weights included, is part of its
configuration. However many load at the same time, and whenever one of them is started again, each finds its share free.
An engine that is added later gets what is free then, divided by the number of engines, which leaves something for
caches of others that are not filled yet.

What must always hold: one engine alone is configured exactly as the operator said; engines that were started together
never have a CPU in common, unless there are more of them than CPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import attrs

from ..config.engine_config import EngineConfig, KvEventsConfig
from ..config.runtime_config import RuntimeConfig
from ..shared.checkpoint import CheckpointError
from .machine_parts import Machine

_TCP = re.compile(r"(tcp://.*:)(\d+)")
_MAX_PORT = 65535
SPIN_COUNT = ("GOMP_SPINCOUNT", "10000")
"""Of an engine's environment. Read by libgomp when torch loads: threads that spin would take CPU time from others and
wait for them."""

T = TypeVar("T")


@attrs.frozen
class EngineShare:
    config: EngineConfig
    environment: dict[str, str]


@attrs.frozen
class Slot:
    cpus: tuple[int, ...] | None
    """None: all that the server may use."""
    num_threads: int
    gpu: str | None
    """As CUDA_VISIBLE_DEVICES names it, or several if it has several ranks; None: all that are visible."""


class EngineShares:
    """Gives each engine its share, and takes it back when the engine has gone."""

    def __init__(
        self,
        config: RuntimeConfig,
        machine: Machine,
        environment: Mapping[str, str],
        available: Callable[[], int | None],
    ) -> None:
        """`available` returns the free memory of the host in bytes.

        Raises CheckpointError if the engines would publish KV events at the same address.
        """
        self._config = config
        self._environment = environment
        self._available = available
        self._num_parts = max(config.num_engines, config.max_engines, 1)
        self._slots = make_slots(
            self._num_parts, config.engine.executor, machine, gpus_each=config.engine.tensor_parallel_size
        )
        self._taken: dict[int, int] = {}
        self._free_at_start = available() if self._num_parts > 1 else None
        if config.engine.kv_events is not None and self._num_parts > 1:
            check_addresses(config.engine.kv_events, self._num_parts)

    def take(self, engine_id: int) -> EngineShare:
        num_parts, config = self._num_parts, self._config
        has_slot = config.autoscales and len(self._taken) < num_parts
        is_later = engine_id >= config.num_engines and not has_slot
        index = engine_id
        if engine_id >= config.num_engines:
            index = self._least_taken(len(self._slots) if is_later else num_parts)
        num_before = sum(taken == index for taken in self._taken.values())
        self._taken[engine_id] = index
        slot = self._slots[index]
        if num_parts == 1 and not is_later:
            return EngineShare(config.engine, self._environment_of(attrs.evolve(slot, gpu=None), None))
        if is_later:
            num_threads = max(1, slot.num_threads // (num_before + 1))
            free, num_sharing = self._available(), len(self._taken)
            num_on_gpu = 1  # of a GPU's memory, it takes whatever the others have left
        else:
            num_threads, free, num_sharing = slot.num_threads, self._free_at_start, num_parts
            num_on_gpu = sum(other.gpu == slot.gpu for other in self._slots[:num_parts])
        return EngineShare(
            attrs.evolve(
                config.engine,
                cpus=slot.cpus,
                num_sharing=num_sharing if slot.gpu is None else num_on_gpu,
                memory_share=None if free is None else free // num_sharing,
                kv_events=events_of(config.engine.kv_events, engine_id),
            ),
            self._environment_of(slot, num_threads),
        )

    def release(self, engine_id: int) -> None:
        """Take back the share of an engine that has been removed."""
        self._taken.pop(engine_id, None)

    def _least_taken(self, num_slots: int) -> int:
        """Return which of the first slots has the fewest engines."""
        counts = Counter(self._taken.values())
        return min(range(num_slots), key=lambda index: counts[index])

    def _environment_of(self, slot: Slot, num_threads: int | None) -> dict[str, str]:
        """Return the environment of an engine. What the operator has said of threads counts for each engine."""
        environment = dict(self._environment)
        if self._config.engine.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._config.engine.num_threads)
        elif num_threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(num_threads))
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.gpu
        return environment


def make_slots(num_engines: int, executor: str, machine: Machine, *, gpus_each: int = 1) -> tuple[Slot, ...]:
    """Cut the machine into a slot for each engine; into more if it has more GPUs, for engines that are added later.

    An engine of several ranks gets as many GPUs, unless the machine has fewer, which it finds out itself.
    """
    if executor == "fake":
        return (Slot(None, 1, None),) * num_engines  # computes nothing
    if machine.gpus and (executor in ("triton", "vllm", "transformers") or (executor == "auto" and machine.has_triton)):
        num_groups = max(1, len(machine.gpus) // gpus_each)
        groups = [",".join(machine.gpus[index * gpus_each : (index + 1) * gpus_each]) for index in range(num_groups)]
        num_threads = max(1, machine.num_usable_cpus // num_engines)
        return tuple(
            Slot(None, num_threads, groups[index % num_groups]) for index in range(max(num_engines, num_groups))
        )
    if num_engines == 1:
        return (Slot(None, machine.num_usable_cpus, None),)
    parts = divide_cpus(machine, num_engines)
    if parts is None:
        return (Slot(None, 1, None),) * num_engines
    num_cpus = len(machine.cpus)  # of which a quota may leave fewer to use
    return tuple(Slot(cpus, max(1, len(cpus) * machine.num_usable_cpus // num_cpus), None) for cpus in parts)


def divide_cpus(machine: Machine, num_parts: int) -> list[tuple[int, ...]] | None:
    """Return disjoint sets of CPUs, as equal as whole cores allow. None: there are fewer CPUs than parts.

    Neighbours in the list of cores stay together, and with them NUMA nodes. A core is cut only if there are fewer cores
    than parts.
    """
    if len(machine.cpus) < num_parts:
        return None
    if len(machine.cores) < num_parts:
        return [tuple(part) for part in _cut(machine.cpus, num_parts)]
    return [tuple(cpu for core in part for cpu in core) for part in _cut(machine.cores, num_parts)]


def _cut(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Cut a list into parts whose lengths differ by one at most, the longer ones first."""
    least, num_larger = divmod(len(items), num_parts)
    starts = [index * least + min(index, num_larger) for index in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def events_of(events: KvEventsConfig | None, engine_id: int) -> KvEventsConfig | None:
    """Return where an engine publishes: if it binds, at a port or file of its own, as in vLLM by the rank."""
    if events is None or engine_id == 0:
        return events
    replay = events.replay_endpoint
    return attrs.evolve(
        events,
        endpoint=_address_of(events.endpoint, engine_id) if events.binds else events.endpoint,
        replay_endpoint=None if replay is None else _address_of(replay, engine_id),
        rank=engine_id,
    )


def check_addresses(events: KvEventsConfig, num_engines: int) -> None:
    """Raises CheckpointError if two engines would bind the same address, or a port that does not exist."""
    bound: dict[str, int] = {}
    for engine_id in range(num_engines):
        its = events_of(events, engine_id)
        assert its is not None
        for address in (its.endpoint if its.binds else None, its.replay_endpoint):
            if address is None or address.endswith(":*"):
                continue
            at = _TCP.fullmatch(address)
            if at is not None and int(at[2]) > _MAX_PORT:
                raise CheckpointError(
                    f"--kv-events-config has no ports for --engines {num_engines}: engine {engine_id} would bind "
                    f"{address}"
                )
            if address in bound:
                raise CheckpointError(
                    f"--kv-events-config has too few ports for --engines {num_engines}: engines {bound[address]} and "
                    f"{engine_id} would both bind {address}; `endpoint` and `replay_endpoint` must be at least "
                    f"{num_engines} ports apart"
                )
            bound[address] = engine_id


def _address_of(address: str, engine_id: int) -> str:
    """Return an engine's own address: the next port but k, or a file with a suffix. A wildcard port stays."""
    if address.endswith(":*"):
        return address
    tcp = _TCP.fullmatch(address)
    return f"{address}_dp{engine_id}" if tcp is None else f"{tcp[1]}{int(tcp[2]) + engine_id}"
