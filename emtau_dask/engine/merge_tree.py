"""Which chunks share a task, and in which order results merge: a tree over chunk numbers.

A node's place depends on chunk numbers alone, so a chunk merges with the same
neighbours whichever chunks are absent, and whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FAN_IN", "Batch", "batches_of", "children", "reduction"]

FAN_IN = 8
TASKS_WANTED = 12
MIN_BATCH_COST, MAX_BATCH_COST = 2**19, 2**22
"""In numbers: as many as MAX_BATCH_COST take about 0.2 s, beside which the 2 ms that a cluster's
scheduler spends on a task are small (`benchmarks/scheduling.py`)."""
CHUNK_COST = 2**14
"""What a chunk costs beside its numbers: a read from zarr takes about a millisecond."""


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
    total = sum(costs.values()) + CHUNK_COST * len(costs)
    limit = min(MAX_BATCH_COST, max(MIN_BATCH_COST, total / TASKS_WANTED))
    level = 0
    while max(costs) // FAN_IN**level:
        level += 1
    waiting, found = list(children(level, sorted(costs))), []
    while waiting:
        batch = waiting.pop()
        cost = sum(costs[chunk] + CHUNK_COST for chunk in batch.chunks)
        if len(batch.chunks) == 1:
            (chunk,) = batch.chunks
            found.append(Batch(0, chunk, batch.chunks))
        elif cost <= limit:
            found.append(batch)
        else:
            waiting += children(batch.level - 1, batch.chunks)
    return sorted(found, key=lambda batch: batch.chunks)


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
