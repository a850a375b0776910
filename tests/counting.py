"""Counting the work of a pass: the graphs it made, the tasks that ran, and the chunks of each of them."""

from contextlib import contextmanager

import dask
import numpy as np
import pytest
from dask.callbacks import Callback
from fits import quietly
from zarr.storage import WrapperStore

from emtau_dask import GaussianMixture
from emtau_dask.execution import graph as merge_tree
from emtau_dask.mixture import features, plan

K = 4
START = {
    "weights_init": np.full(K, 1 / K),
    "means_init": np.array([[-50.0, -50], [-0.5, 0.2], [1.5, 1.0], [50, 50]]),
    "precisions_init": np.array([np.eye(2)] * K),
}
"""Of two clusters far from all others, and two that overlap."""


class Tasks(Callback):
    """The graphs of all computations, and the keys of the tasks that ran in each."""

    def __init__(self):
        super().__init__(start=self._note_graph, pretask=self._note_task)
        self.graphs, self.ran = [], []

    def _note_graph(self, graph):
        self.graphs.append(dict(graph))
        self.ran.append([])

    def _note_task(self, key, graph, state):
        self.ran[-1].append(key)

    def ran_of(self, name):
        """The tasks of this name that ran, by computation."""
        computations = zip(self.graphs, self.ran, strict=True)
        return [[graph[key] for key in ran if layer(key) == name] for graph, ran in computations]


def counted_fit(X, algorithm, max_iter, scheduler="synchronous", **fit_options):
    """Fit from `START`; return the mixture and the `Tasks`."""
    mixture = GaussianMixture(K, algorithm=algorithm, tol=0, max_iter=max_iter, **START)
    with dask.config.set(scheduler=scheduler), Tasks() as tasks:
        quietly(mixture, X, **fit_options)
    return mixture, tasks


def layer(key):
    """`("emtau-estep-0123", 4)` -> "emtau-estep"; the name of a task that is not the engine's as it is."""
    name = key[0] if isinstance(key, tuple) else key
    return name.rpartition("-")[0] if name.startswith("emtau-") else name


def chunks_of(keys, name="emtau-estep"):
    """The chunks of the tasks of this name, each as often as it has one, where each task has one chunk."""
    return sorted(key[1] for key in keys if layer(key) == name)


def processed(node):
    """The items that a task of a pass holds, read from the task itself: of one chunk, or of a batch."""
    given = [argument for argument in node.func.args if not isinstance(argument, int)]
    (items,) = given
    return list(items.values()) if isinstance(items, dict) else [items]


class Reads(WrapperStore):
    """A local store that notes which chunks are asked for."""

    chunks = ()

    async def get(self, key, prototype, byte_range=None):
        if "/c/" in f"/{key}":
            self.chunks = (*self.chunks, int(key.split("c/")[1].split("/")[0]))
        return await self._store.get(key, prototype, byte_range)


@contextmanager
def one_chunk_a_task():
    """No chunk is small enough to share its task with another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_tree, "MIN_BATCH_COST", 0)
        patch.setattr(merge_tree, "MAX_BATCH_COST", 0)
        patch.setattr(merge_tree, "ENOUGH_TASKS", float("inf"))
        yield


@contextmanager
def plans_counted():
    """The parameters for which a kernel is planned in this process, in order."""
    planned, frames_of = [], features.frames_of

    def noted(parameters):
        planned.append(parameters)
        return frames_of(parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "frames_of", noted)
        yield planned


CHUNK_COST, LEAST, MOST, TASKS = 16384, 524288, 4194304, 12
"""What a chunk costs beside its numbers, the bounds of a batch's cost, and how many batches are wanted."""
ENOUGH, CHUNKS = 1000, 512
"""The part of a pass that is never divided, and the most chunks of a batch."""


def expected_batches(costs):
    """For each chunk the uppermost node above it that is small enough, or that holds no other chunk."""
    numbers = {chunk: cost + CHUNK_COST for chunk, cost in costs.items()}
    total = sum(numbers.values())
    limit = max(total / ENOUGH, min(MOST, max(LEAST, total / TASKS)))
    found = set()
    for chunk in costs:
        for level in range(9, -1, -1):
            below = tuple(sorted(c for c in costs if c // 8**level == chunk // 8**level))
            small = sum(numbers[c] for c in below) <= limit and len(below) <= CHUNKS
            if len(below) == 1 or small:
                found.add(below)
                break
    return sorted(found)
