"""Memory that reads use again: never while anything refers to it, and none is left when nothing does."""

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emtau_dask.storage.direct_reads import KEPT_BYTES, LEAST_REUSED, ReusedMemory

SIZE = LEAST_REUSED


def address(array):
    return array.__array_interface__["data"][0]


def kept(memory):
    return [len(each) for each in memory._kept]


def test_it_is_used_again_while_other_memory_is_in_use():
    memory = ReusedMemory()
    first, second = memory.room(SIZE), memory.room(SIZE)
    where = address(first)
    del first
    assert kept(memory) == [SIZE]
    assert address(memory.room(SIZE)) == where != address(second)


def test_it_is_let_go_when_none_is_in_use():
    memory = ReusedMemory()
    first, second = memory.room(SIZE), memory.room(SIZE)
    del first, second
    assert kept(memory) == []


REFERENCES = [
    lambda room: room.view(np.float64).reshape(-1, 16)[3:5],
    lambda room: room.view(np.float64).reshape(-1, 16)[:, 2].T,
    lambda room: memoryview(room[10:20]),
    lambda room: np.frombuffer(memoryview(room)[8:], np.float32),
    lambda room: np.asarray(room.view(np.recarray)),
    lambda room: {"rows": room[:1]}.items(),
]


def test_anything_that_refers_to_it_keeps_it():
    held = []
    for refer in REFERENCES:
        memory = ReusedMemory()
        other, room = memory.room(SIZE), memory.room(SIZE)
        held.append((memory, other, address(room), refer(room)))
        del room
    gc.collect()
    for memory, other, where in (each[:3] for each in held):
        assert kept(memory) == []
        assert address(memory.room(SIZE)) not in (where, address(other))
    left = [each[:2] for each in held]
    held.clear()
    gc.collect()
    assert [kept(memory) for memory, _ in left] == [[SIZE, SIZE]] * len(REFERENCES)


def test_rows_in_a_cycle_are_kept_until_it_is_collected():
    class Node:
        pass

    memory = ReusedMemory()
    other, node = memory.room(SIZE), Node()
    node.rows, node.itself = memory.room(SIZE)[:8], node
    seen = []
    weakref.finalize(node, lambda: seen.append(kept(memory)))
    del node
    assert kept(memory) == []
    gc.collect()
    assert seen == [[]]
    assert kept(memory) == [len(other)]


def test_little_is_kept_or_a_single_one():
    memory = ReusedMemory()
    rooms = [memory.room(KEPT_BYTES // 2) for _ in range(5)]
    del rooms[1:]
    assert kept(memory) == [KEPT_BYTES // 2] * 2
    large = ReusedMemory()
    rooms = [large.room(2 * KEPT_BYTES) for _ in range(3)]
    del rooms[1:]
    assert kept(large) == [2 * KEPT_BYTES]


def test_memory_of_another_size_is_not_used():
    memory = ReusedMemory()
    other, room = memory.room(SIZE), memory.room(SIZE)
    del room
    assert len(memory.room(2 * SIZE)) == 2 * SIZE
    assert len(other) == SIZE


def test_small_memory_is_not_kept():
    memory = ReusedMemory()
    other, small = memory.room(SIZE), memory.room(SIZE - 1)
    del small
    assert kept(memory) == []
    assert len(other) == SIZE


@given(st.lists(st.tuples(st.sampled_from(["take", "leave", "leave half"]), st.integers(0, 30)), max_size=40))
def test_what_is_in_use_is_never_written_by_another(steps):
    memory, held = ReusedMemory(), {}
    for number, (step, which) in enumerate(steps):
        if step == "take":
            held[number] = memory.room(SIZE + which % 2)
            held[number][...] = number % 251
        elif held:
            chosen = sorted(held)[which % len(held)]
            rows = held.pop(chosen)
            if step == "leave half":
                held[chosen] = rows[: max(1, len(rows) // 2)]
            del rows
        for taken, values in held.items():
            assert values[0] == values[-1] == taken % 251
            assert (values[:: LEAST_REUSED // 16] == taken % 251).all()
