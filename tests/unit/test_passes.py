"""One pass over chunks: which tasks run, in which order results merge, who is told."""

import threading

import dask
import dask.array as da
import numpy as np
import pytest

from emtau_dask.engine.observer import SilentObserver
from emtau_dask.engine.passes import NO_SOURCE, run_pass
from emtau_dask.errors import InvalidDataError
from emtau_dask.storage import GraphSource


def joined(a, b):
    return f"({a} {b})"


def name_of(chunk, *blocks):
    return str(chunk)


def merged(chunks, task=name_of, sources=(), observer=None):
    observer = observer or SilentObserver()
    return run_pass(task, joined, sources, chunks, name="test", stage="a stage", observer=observer)


def expected_tree(chunks):
    """Top down: split where numbers differ in their highest differing octal digit, and fold the parts."""
    if len(chunks) == 1:
        return str(chunks[0])
    width = 1
    while len({chunk // (8 * width) for chunk in chunks}) > 1:
        width *= 8
    groups = sorted({chunk // width for chunk in chunks})
    result, *rest = [expected_tree([chunk for chunk in chunks if chunk // width == g]) for g in groups]
    for part in rest:
        result = f"({result} {part})"
    return result


@pytest.mark.parametrize(
    ("chunks", "tree"),
    [
        ([0], "0"),
        ([41], "41"),
        ([0, 1], "(0 1)"),
        ([0, 1, 2], "((0 1) 2)"),
        ([0, 1, 9], "((0 1) 9)"),
        ([0, 9, 10], "(0 (9 10))"),
        ([7, 8], "(7 8)"),
        ([0, 9, 10, 64, 65], "((0 (9 10)) (64 65))"),
        ([6, 7, 8, 9], "((6 7) (8 9))"),
    ],
)
def test_small_trees_by_hand(chunks, tree):
    assert merged(chunks) == tree


@pytest.mark.parametrize("n", [8, 9, 63, 64, 65, 150])
def test_the_tree_is_fixed_by_chunk_number(n):
    assert merged(list(range(n))) == expected_tree(list(range(n)))


@pytest.mark.parametrize("seed", range(5))
def test_absent_chunks_leave_the_others_where_they_are(seed):
    rng = np.random.default_rng(seed)
    chunks = sorted(rng.choice(600, size=rng.integers(2, 80), replace=False).tolist())
    assert merged(chunks) == expected_tree(chunks)


def test_the_order_in_which_chunks_are_given_does_not_matter():
    assert merged([70, 3, 9, 1, 8]) == merged([1, 3, 8, 9, 70])


@pytest.mark.parametrize("scheduler", ["synchronous", "threads", "processes"])
def test_the_tree_is_the_same_on_every_scheduler(scheduler):
    with dask.config.set(scheduler=scheduler, num_workers=2):
        assert merged(list(range(20))) == expected_tree(list(range(20)))


def test_no_chunks_have_no_result():
    assert merged([]) is None


def test_a_task_gets_the_blocks_of_its_own_chunk():
    array = da.from_array(np.arange(12).reshape(6, 2), chunks=((1, 0, 2, 3), (1, 1)))

    def task(chunk, blocks, nothing):
        assert nothing == []
        return f"{chunk}:{np.concatenate(blocks, axis=1).ravel().tolist()}"

    found = merged([0, 2], task, [GraphSource(array + 0), NO_SOURCE])
    assert found == "(0:[0, 1] 2:[2, 3, 4, 5])"


def test_an_error_of_a_task_comes_out_as_it_is():
    def task(chunk):
        raise InvalidDataError(f"chunk {chunk} is bad")

    with pytest.raises(InvalidDataError, match=r"^chunk 3 is bad$"):
        merged([3], task)


def test_the_configured_scheduler_is_used():
    with dask.config.set(scheduler="synchronous"):
        found = merged([0, 1], lambda chunk: threading.current_thread().name)
    name = threading.current_thread().name
    assert found == f"({name} {name})"


class Recorder(SilentObserver):
    def __init__(self):
        self.told = []

    def stage(self, name, chunks):
        self.told.append((name, chunks))

    def chunk_done(self):
        self.told.append("chunk")


@pytest.mark.parametrize("chunks", [[], [5], list(range(20))], ids=len)
def test_the_observer_hears_of_the_stage_and_of_every_chunk(chunks):
    observer = Recorder()
    merged(chunks, observer=observer)
    assert observer.told == [("a stage", len(chunks)), *["chunk"] * len(chunks)]
