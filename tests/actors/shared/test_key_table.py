"""The table of block keys: its operations, and that both implementations agree."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from quipu.actors.shared.key_table import KeyTable, PythonKeyTable, make_key_table

Make = Callable[[], KeyTable[Any]]
TABLES: list[Make] = [PythonKeyTable, make_key_table]
KEYS = [random.Random(number).randbytes(32) for number in range(400)]


@pytest.mark.parametrize("make", TABLES)
def test_put_take_discard(make: Make) -> None:
    """The last value counts; what is taken or discarded is gone; a key may be given twice."""
    table = make()
    table.put(KEYS[:3], "a")
    table.put(KEYS[2:4], "b")
    assert [table.find(key) for key in KEYS[:5]] == ["a", "a", "b", "b", None]
    assert table.take([KEYS[3], KEYS[9], KEYS[3]]) == ["b", None, None]
    table.discard([KEYS[0], KEYS[0], KEYS[9]])
    assert len(table) == 2 and sorted(table.all_keys()) == sorted(KEYS[1:3])
    table.clear()
    assert len(table) == 0 and table.all_keys() == [] and table.take(KEYS[:2]) == [None, None]
    table.put(tuple(KEYS[:2]), None)
    assert len(table) == 2


def test_random_calls() -> None:
    """Both implementations give the same results for the same calls, while the table grows and after it was cleared."""
    draw = random.Random(5)
    for _ in range(30):
        ours: KeyTable[float] = make_key_table()
        reference = PythonKeyTable[float]()
        for number in range(120):
            keys = draw.choices(KEYS, k=draw.randrange(200))
            match draw.randrange(10):
                case 0 | 1 | 2 | 3:
                    ours.put(keys, float(number))
                    reference.put(keys, float(number))
                case 4 | 5 | 6:
                    assert ours.take(keys) == reference.take(keys)
                case 7 | 8:
                    ours.discard(keys)
                    reference.discard(keys)
                case _ if draw.random() < 0.1:
                    ours.clear()
                    reference.clear()
            assert len(ours) == len(reference)
        assert sorted(ours.all_keys()) == sorted(reference.all_keys())
        assert [ours.find(key) for key in KEYS] == [reference.find(key) for key in KEYS]


def test_references() -> None:
    """A value is kept as long as a key has it, and no longer, also when the table is deleted."""
    table: KeyTable[object] = make_key_table()
    value = object()
    before = sys.getrefcount(value)
    table.put(KEYS, value)
    table.put(KEYS[:100], None)
    table.discard(KEYS[100:200])
    assert table.take(KEYS[200:300]) == [value] * 100
    assert sys.getrefcount(value) == before + 100
    table.clear()
    assert sys.getrefcount(value) == before
    table.put(KEYS, value)
    del table
    gc.collect()
    assert sys.getrefcount(value) == before


@pytest.mark.parametrize("wrong", [[KEYS[0], b"short"], [KEYS[0], 5], 7])
def test_wrong_keys_change_nothing(wrong: Any) -> None:
    """A call with an invalid key changes nothing."""
    table: KeyTable[Any] = make_key_table()
    if isinstance(table, PythonKeyTable):
        pytest.skip("the table in Python takes anything")
    table.put(KEYS[:1], "a")
    for call in (table.take, table.discard, lambda keys: table.put(keys, "b")):
        with pytest.raises((TypeError, ValueError)):
            call(wrong)
    assert table.find(KEYS[0]) == "a" and len(table) == 1
