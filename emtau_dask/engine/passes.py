"""One pass over chunks: a task for each, and a tree of merges fixed by chunk number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar, cast
from uuid import uuid4

import dask
from dask.callbacks import Callback
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from emtau_dask.engine.observer import FitObserver

__all__ = ["NO_SOURCE", "ChunkInput", "run_pass"]

T = TypeVar("T")
FAN_IN = 8


class ChunkInput(Protocol):
    """The half of a `Source` that decides what a chunk's task depends on."""

    def references(self, chunk: int) -> list[Hashable]:
        """Return the keys of the tasks that a chunk's task depends on."""
        ...

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return the tasks behind the references of ``chunks``."""
        ...


class _NoSource:
    """Nothing to read: no references, no tasks."""

    def references(self, chunk: int) -> list[Hashable]:
        return []

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        return {}


NO_SOURCE: ChunkInput = _NoSource()
"""Stands in the place of an input that a task does not have."""


def _merge_all(merge: Callable[[T, T], T], results: Sequence[T]) -> T:
    return reduce(merge, results)


def _reduction(
    leaves: dict[int, Hashable], merge: Callable[[T, T], T], name: str
) -> tuple[Hashable, dict[Hashable, Any]]:
    """Return the root key and the merge tasks of a tree over ``leaves``, by chunk number.

    A node's place depends on chunk numbers alone, so a chunk merges with the
    same neighbours whichever chunks are absent; a node with one child is that
    child, without a task.
    """
    tasks: dict[Hashable, Any] = {}
    nodes, level = leaves, 0
    while len(nodes) > 1:
        groups: dict[int, list[Hashable]] = {}
        for number in sorted(nodes):
            groups.setdefault(number // FAN_IN, []).append(nodes[number])
        nodes, level = {}, level + 1
        for group, children in groups.items():
            if len(children) == 1:
                nodes[group] = children[0]
                continue
            key = (name, level, group)
            tasks[key] = (partial(_merge_all, merge), children)
            nodes[group] = key
    return next(iter(nodes.values())), tasks


def run_pass(
    task: Callable[..., T],
    merge: Callable[[T, T], T],
    sources: Sequence[ChunkInput],
    chunks: Sequence[int],
    *,
    name: str,
    stage: str,
    observer: FitObserver,
) -> T | None:
    """Run ``task(chunk, *blocks)`` for each chunk and merge the results.

    Runs wherever dask's own precedence says: the scheduler of a config or
    context, else the active distributed client, else threads.

    Parameters
    ----------
    task : callable (chunk, *blocks) -> T
        ``blocks`` are the computed references of the chunk, a list for each
        source; the task holds the sources' readers.
    merge : callable (T, T) -> T
    sources : sequence of ChunkInput
        Sources, all of the same chunks.
    chunks : sequence of int
        Those to process; exactly one task each, none for others.
    name : str
        Names the tasks ``emtau-<name>-…``.
    stage : str
        Told to the observer.
    observer : FitObserver

    Returns
    -------
    T or None
        None where there are no chunks.
    """
    observer.stage(stage, len(chunks))
    if not chunks:
        return None
    token = uuid4().hex
    layer = f"emtau-{name}-{token}"
    graph: dict[Hashable, Any] = {}
    for source in sources:
        graph.update(source.graph(chunks))
    leaves: dict[int, Hashable] = {}
    for chunk in chunks:
        key = (layer, chunk)
        graph[key] = (partial(task, chunk), *(source.references(chunk) for source in sources))
        leaves[chunk] = key
    root, merges = _reduction(leaves, merge, f"emtau-merge-{token}")
    graph.update(merges)
    result = Delayed(root, HighLevelGraph.from_collections(layer, graph), layer=layer)

    def count(key: Hashable, *_: Any) -> None:
        if isinstance(key, tuple) and key[0] == layer:
            observer.chunk_done()

    with Callback(posttask=count):
        (value,) = dask.compute(result, traverse=False)
    return cast("T", value)
