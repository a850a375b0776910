"""Which chunks share a task, and in which order results merge: a tree over chunk numbers.

A node's place depends on chunk numbers alone, so a chunk merges with the same
neighbours whichever chunks are absent, and whoever computes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

FAN_IN = 8
TASKS_WANTED = 12
MIN_BATCH_COST, MAX_BATCH_COST = 2**19, 2**22
"""In numbers: as many as MAX_BATCH_COST take about 0.2 s, beside which the 2 ms that a cluster's
scheduler spends on a task are small (`benchmarks/scheduling.py`)."""
CHUNK_COST = 2**14
"""What a chunk costs beside its numbers: a read from zarr takes about a millisecond."""
MOST_CHUNKS = MAX_BATCH_COST // CHUNK_COST
"""Chunks of a task, at most."""


@dataclass(frozen=True)
class Batch:
    """Chunks that one task processes: all of those present below one node of the merge tree.

    Attributes
    ----------
    level : int
        Of the node: 0 for a single chunk.
    number : int
        Of the node in its level: chunk number // FAN_IN**level.
    chunks : tuple of int
        Ascending.
    """

    level: int
    number: int
    chunks: tuple[int, ...]


def children(level: int, chunks: Sequence[int]) -> Iterator[Batch]:
    """Yield the nodes of ``level`` that hold ``chunks`` (ascending)."""
    groups: dict[int, list[int]] = {}
    for chunk in chunks:
        groups.setdefault(chunk // FAN_IN**level, []).append(chunk)
    for number, members in groups.items():
        yield Batch(level, number, tuple(members))


def batches_of(costs: Mapping[int, float]) -> list[Batch]:
    """Return the batches in which chunks travel: the largest nodes of the tree that are small enough.

    Which chunks share a task changes no bit of the result: a batch merges
    exactly as the tree would have merged its chunks.

    Parameters
    ----------
    costs : mapping of int to float
        By chunk: roughly the numbers that its task reads and scores.
    """
    chunks = sorted(costs)
    upto = [0.0, *accumulate(costs[chunk] + CHUNK_COST for chunk in chunks)]
    limit = min(MAX_BATCH_COST, max(MIN_BATCH_COST, upto[-1] / TASKS_WANTED))
    found: list[Batch] = []

    def divide(level: int, number: int, begin: int, end: int) -> None:
        """Add the batches of the node that holds ``chunks[begin:end]``."""
        if end == begin + 1:
            found.append(Batch(0, chunks[begin], (chunks[begin],)))
        elif upto[end] - upto[begin] <= limit:
            found.append(Batch(level, number, tuple(chunks[begin:end])))
        else:
            width = FAN_IN ** (level - 1)
            while begin < end:
                child = chunks[begin] // width
                after = bisect_left(chunks, (child + 1) * width, begin, end)
                divide(level - 1, child, begin, after)
                begin = after

    height = 0
    while chunks[-1] // FAN_IN**height:
        height += 1
    divide(height, 0, 0, len(chunks))
    return found


def reduction(
    leaves: Mapping[int, Mapping[int, Hashable]],
    merge: Callable[[list[Hashable]], tuple[Any, ...]],
    name: str,
) -> tuple[Hashable, dict[Hashable, Any]]:
    """Return the root key and the merge tasks of a tree.

    A node with one child is that child, without a task.

    Parameters
    ----------
    leaves : mapping of level to mapping of number to key
        The nodes that are there already.
    merge : callable (list of key) -> tuple
        The task that merges them.
    name : str
        What merge tasks are called.
    """
    tasks: dict[Hashable, Any] = {}
    nodes: dict[int, Hashable] = dict(leaves.get(0, {}))
    level, highest = 0, max(leaves)
    while len(nodes) > 1 or level < highest:
        groups: dict[int, list[Hashable]] = {}
        for number in sorted(nodes):
            groups.setdefault(number // FAN_IN, []).append(nodes[number])
        level += 1
        nodes = dict(leaves.get(level, {}))
        for group, members in groups.items():
            if len(members) == 1:
                nodes[group] = members[0]
                continue
            key = (name, level, group)
            tasks[key] = merge(members)
            nodes[group] = key
    return next(iter(nodes.values())), tasks
