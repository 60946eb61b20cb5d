"""How a machine is divided among engines: CPUs, threads, GPUs, memory and addresses, for many numbers of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import pytest

from quipu.actors.config.engine_config import KvEventsConfig
from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.fleet.engine_shares import EngineShare, EngineShares, divide_cpus, events_of, make_slots
from quipu.actors.fleet.machine_parts import Core, Machine
from quipu.actors.shared.checkpoint import CheckpointError
from tests.runtimes import runtime_config

GIB = 1 << 30
TWO = ((0,), (1,))
EIGHT = tuple((cpu,) for cpu in range(8))
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))
"""Eight CPUs in four cores."""


def machine_of(cores: Sequence[Core], *gpus: str, quota: int | None = None, has_triton: bool = True) -> Machine:
    cores = tuple(cores)
    return Machine(cores, quota or sum(map(len, cores)), gpus, has_triton)


def config_of(num_engines: int, executor: str = "cpu", **engine: object) -> RuntimeConfig:
    config = runtime_config()
    engine_config = attrs.evolve(config.engine, executor=executor, **engine)
    return attrs.evolve(config, num_engines=num_engines, engine=engine_config)


def shares_of(
    config: RuntimeConfig, machine: Machine, environment: dict[str, str] | None = None, free: int | None = 24 * GIB
) -> EngineShares:
    return EngineShares(config, machine, environment or {}, lambda: free)


def all_of(shares: EngineShares, count: int) -> list[EngineShare]:
    return [shares.take(engine_id) for engine_id in range(count)]


# ---------------------------------------------------------------- processors


@pytest.mark.parametrize(
    ("cores", "num_engines", "parts"),
    [
        (TWO, 2, [(0,), (1,)]),
        (EIGHT, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (EIGHT, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (EIGHT, 5, [(0, 1), (2, 3), (4, 5), (6,), (7,)]),
        (EIGHT, 8, list(EIGHT)),
        # hyperthreads of one core stay together
        (PAIRS, 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (PAIRS, 3, [(0, 4, 1, 5), (2, 6), (3, 7)]),
        (PAIRS, 4, list(PAIRS)),
        # unless there are fewer cores than engines
        (PAIRS, 5, [(0, 4), (1, 5), (2, 6), (3,), (7,)]),
    ],
)
def test_cpus(cores: tuple[Core, ...], num_engines: int, parts: list[tuple[int, ...]]) -> None:
    """Engines have disjoint CPUs, all of them together, and as many threads as CPUs."""
    found = all_of(shares_of(config_of(num_engines), machine_of(cores)), num_engines)
    assert [share.config.cpus for share in found] == parts
    assert [share.environment["OMP_NUM_THREADS"] for share in found] == [str(len(part)) for part in parts]
    assert Counter(cpu for part in parts for cpu in part) == Counter(cpu for core in cores for cpu in core)


@pytest.mark.parametrize(("cores", "num_engines"), [(TWO, 3), (TWO, 5), (EIGHT, 9)])
def test_more_engines_than_cpus(cores: tuple[Core, ...], num_engines: int) -> None:
    """More engines than CPUs are not pinned, and have one thread each."""
    for share in all_of(shares_of(config_of(num_engines), machine_of(cores)), num_engines):
        assert share.config.cpus is None
        assert share.environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("num_engines", range(2, 40))
@pytest.mark.parametrize("cores", [EIGHT, PAIRS, tuple((2 * core, 2 * core + 1) for core in range(16))])
def test_parts_are_fair(cores: tuple[Core, ...], num_engines: int) -> None:
    """No CPU is in two parts, and no part is larger than another by more than one core."""
    parts = divide_cpus(machine_of(cores), num_engines)
    num_cpus = sum(map(len, cores))
    if num_engines > num_cpus:
        assert parts is None
        return
    assert parts is not None and len(parts) == num_engines
    assert sorted(cpu for part in parts for cpu in part) == sorted(cpu for core in cores for cpu in core)
    assert max(map(len, parts)) - min(map(len, parts)) <= max(map(len, cores))
    if num_engines <= len(cores):
        assert all(sum(set(core) <= set(part) for part in parts) == 1 for core in cores)


def test_quota() -> None:
    """A quota is divided, too: the threads of all engines together do not exceed it."""
    slots = make_slots(2, "cpu", machine_of(EIGHT, quota=4))
    assert [(slot.cpus, slot.num_threads) for slot in slots] == [((0, 1, 2, 3), 2), ((4, 5, 6, 7), 2)]
    assert [slot.num_threads for slot in make_slots(3, "cpu", machine_of(EIGHT, quota=1))] == [1, 1, 1]


def test_threads_are_per_engine() -> None:
    """The operator's number of threads holds for each engine; the flag takes precedence over the variable."""
    machine = machine_of(EIGHT)
    said = all_of(shares_of(config_of(2, num_threads=3), machine, {"OMP_NUM_THREADS": "7"}), 2)
    assert [share.environment["OMP_NUM_THREADS"] for share in said] == ["3", "3"]
    inherited = all_of(shares_of(config_of(2), machine, {"OMP_NUM_THREADS": "7"}), 2)
    assert [share.environment["OMP_NUM_THREADS"] for share in inherited] == ["7", "7"]


@pytest.mark.parametrize("executor", ["auto", "cpu", "triton", "vllm", "reference", "fake"])
def test_one_engine(executor: str) -> None:
    """A single engine gets the operator's configuration unchanged."""
    events = KvEventsConfig(replay_endpoint="tcp://127.0.0.1:5558")
    environment = {"PATH": "/bin"}
    config = config_of(1, executor, kv_events=events)
    share = shares_of(config, machine_of(EIGHT, "0", "1"), environment).take(0)
    assert share == EngineShare(config.engine, environment)
    threads = shares_of(config_of(1, executor, num_threads=3), machine_of(EIGHT), environment).take(0)
    assert threads.environment == {"PATH": "/bin", "OMP_NUM_THREADS": "3"}


def test_fake_is_not_pinned() -> None:
    """Engines that compute nothing stay where the scheduler puts them."""
    for share in all_of(shares_of(config_of(2, "fake"), machine_of(EIGHT, "0")), 2):
        assert share.config.cpus is None
        assert "CUDA_VISIBLE_DEVICES" not in share.environment


# ---------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("gpus", "num_engines", "expected", "num_sharing"),
    [
        (("0", "1"), 2, ["0", "1"], [1, 1]),
        (("0", "1", "2", "3"), 2, ["0", "1"], [1, 1]),
        (("0", "1"), 3, ["0", "1", "0"], [2, 1, 2]),
        (("0",), 3, ["0", "0", "0"], [3, 3, 3]),
        (("GPU-a", "GPU-b"), 2, ["GPU-a", "GPU-b"], [1, 1]),
    ],
)
@pytest.mark.parametrize("executor", ["auto", "triton", "vllm"])
def test_gpu_each(
    gpus: tuple[str, ...], num_engines: int, expected: list[str], num_sharing: list[int], executor: str
) -> None:
    """Each engine sees one GPU, in turn, and knows how many share its memory."""
    found = all_of(shares_of(config_of(num_engines, executor), machine_of(EIGHT, *gpus)), num_engines)
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == expected
    assert [share.config.num_sharing for share in found] == num_sharing
    assert all(share.config.cpus is None for share in found)
    assert {share.environment["OMP_NUM_THREADS"] for share in found} == {str(max(1, 8 // num_engines))}


@pytest.mark.parametrize(
    ("num_engines", "expected"),
    [(2, ["0,1", "2,3"]), (3, ["0,1", "2,3", "0,1"])],
)
def test_gpus_of_ranks(num_engines: int, expected: list[str]) -> None:
    """Engines of two ranks get two GPUs each; one that is left over is not used."""
    slots = make_slots(num_engines, "vllm", machine_of(EIGHT, "0", "1", "2", "3", "4"), gpus_each=2)
    assert [slot.gpu for slot in slots] == expected
    assert [slot.gpu for slot in make_slots(1, "vllm", machine_of(EIGHT, "0"), gpus_each=2)] == ["0"]
    config = config_of(num_engines, "vllm")
    config = attrs.evolve(config, engine=attrs.evolve(config.engine, tensor_parallel_size=2))
    found = all_of(shares_of(config, machine_of(EIGHT, "0", "1", "2", "3")), num_engines)
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == expected


@pytest.mark.parametrize(("executor", "has_triton"), [("cpu", True), ("reference", True), ("auto", False)])
def test_gpus_unused(executor: str, has_triton: bool) -> None:
    """Engines that compute on CPUs are pinned to them, whatever GPUs there are."""
    found = all_of(shares_of(config_of(2, executor), machine_of(TWO, "0", "1", has_triton=has_triton)), 2)
    assert [share.config.cpus for share in found] == [(0,), (1,)]
    assert all("CUDA_VISIBLE_DEVICES" not in share.environment for share in found)


# ---------------------------------------------------------------- memory


def test_memory_is_measured_once() -> None:
    """Every engine gets the same part of the memory that was free at start, whatever is free later."""
    free = iter([24 * GIB, GIB])
    shares = EngineShares(config_of(3), machine_of(EIGHT), {}, lambda: next(free))
    assert [share.config.memory_share for share in all_of(shares, 3)] == [8 * GIB] * 3
    assert {share.config.num_sharing for share in all_of(shares, 3)} == {3}
    assert next(free) == GIB


def test_memory_unknown() -> None:
    """If free memory cannot be read, engines get no memory share."""
    assert shares_of(config_of(2), machine_of(TWO), free=None).take(0).config.memory_share is None


# ---------------------------------------------------------------- engines that are added later


def test_later_engine_takes_free_slot() -> None:
    """A later engine takes the part of one that is gone, or shares the least used part; its memory is a share of what
    is free then."""
    free = [24 * GIB]
    shares = EngineShares(config_of(2), machine_of(EIGHT), {}, lambda: free[0])
    first, second = all_of(shares, 2)
    shares.release(0)
    free[0] = 10 * GIB
    third = shares.take(2)
    assert third.config.cpus == first.config.cpus
    assert third.environment["OMP_NUM_THREADS"] == "4"
    assert (third.config.memory_share, third.config.num_sharing) == (5 * GIB, 2)
    fourth, fifth = shares.take(3), shares.take(4)
    assert [fourth.config.cpus, fifth.config.cpus] == [first.config.cpus, second.config.cpus]
    assert fourth.environment["OMP_NUM_THREADS"] == "2", "it must have half of the threads of a shared part"
    assert (fourth.config.memory_share, fifth.config.memory_share) == (10 * GIB // 3, 10 * GIB // 4)


def test_later_engine_takes_free_gpu() -> None:
    """A later engine takes a free GPU; a single engine, which sees all of them, uses the first."""
    shares = shares_of(config_of(1, "triton"), machine_of(EIGHT, "0", "1", "2"))
    found = all_of(shares, 4)
    assert [share.environment.get("CUDA_VISIBLE_DEVICES") for share in found] == [None, "1", "2", "0"]
    assert {share.config.num_sharing for share in found} == {1}


def test_later_engine_beside_one() -> None:
    """An engine added to a single one, which has all CPUs, has all of them, too, with half as many threads."""
    shares = shares_of(config_of(1), machine_of(EIGHT))
    _, later = all_of(shares, 2)
    assert later.config.cpus is None
    assert later.environment["OMP_NUM_THREADS"] == "4"
    assert later.config.memory_share == 12 * GIB


# ---------------------------------------------------------------- KV events


@pytest.mark.parametrize(
    ("endpoint", "binds", "replay", "expected"),
    [
        ("tcp://*:5557", True, None, ("tcp://*:5560", None)),
        ("tcp://127.0.0.1:5557", True, "tcp://[::1]:6000", ("tcp://127.0.0.1:5560", "tcp://[::1]:6003")),
        ("tcp://127.0.0.1:*", True, "tcp://*:*", ("tcp://127.0.0.1:*", "tcp://*:*")),
        ("ipc:///tmp/events", True, "ipc:///tmp/replay", ("ipc:///tmp/events_dp3", "ipc:///tmp/replay_dp3")),
        ("tcp://router:5557", False, "tcp://*:5558", ("tcp://router:5557", "tcp://*:5561")),
    ],
)
def test_event_addresses(endpoint: str, binds: bool, replay: str | None, expected: tuple[str, str | None]) -> None:
    """Each engine binds addresses of its own: the port plus its number, or a file with a suffix."""
    events = KvEventsConfig(endpoint=endpoint, binds=binds, replay_endpoint=replay)
    own = events_of(events, 3)
    assert own is not None
    assert (own.endpoint, own.replay_endpoint) == expected
    assert own.rank == 3
    assert events_of(events, 0) == events
    assert events_of(None, 3) is None


@pytest.mark.parametrize(
    ("endpoint", "replay", "num_engines", "named"),
    [
        ("tcp://*:5557", "tcp://*:5558", 2, r"--engines 2: engines 0 and 1 would both bind tcp://\*:5558"),
        ("tcp://*:5557", "tcp://*:5560", 4, r"at least 4 ports apart"),
        ("tcp://*:65534", None, 3, r"engine 2 would bind tcp://\*:65536"),
    ],
)
def test_event_addresses_collide(endpoint: str, replay: str | None, num_engines: int, named: str) -> None:
    """Start is refused if two engines would bind the same address, or if no port is left."""
    events = KvEventsConfig(endpoint=endpoint, replay_endpoint=replay)
    with pytest.raises(CheckpointError, match=named):
        shares_of(config_of(num_engines, kv_events=events), machine_of(EIGHT))
    shares_of(config_of(1, kv_events=events), machine_of(EIGHT))


def test_event_addresses_apart() -> None:
    """Ports that are as far apart as there are engines are enough; one subscriber's address may serve all."""
    apart = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5561")
    shares_of(config_of(4, kv_events=apart), machine_of(EIGHT))
    shares_of(config_of(4, kv_events=KvEventsConfig(endpoint="tcp://a:1", binds=False)), machine_of(EIGHT))
    shares_of(config_of(4, kv_events=attrs.evolve(apart, replay_endpoint="tcp://*:*")), machine_of(EIGHT))


def test_engines_that_come_with_the_load() -> None:
    """Engines added with the load get the parts that they would have had from the start; one beyond the maximum shares
    a part."""
    config = attrs.evolve(config_of(1), min_engines=1, max_engines=4)
    shares = shares_of(config, machine_of(EIGHT))
    whole = all_of(shares_of(config_of(4), machine_of(EIGHT)), 4)
    found = [shares.take(engine_id) for engine_id in range(4)]
    assert [share.config for share in found] == [share.config for share in whole]
    shares.release(2)
    assert shares.take(4).config == whole[2].config
    assert shares.take(5).config.cpus in [share.config.cpus for share in whole]
