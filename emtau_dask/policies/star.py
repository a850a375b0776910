"""EM*: only the rows in the tails of per-component heaps stay active."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.constraints import FRACTION, choice, either, integer
from emtau_dask.policies.policy import BuiltInPolicy, Evidence, NextPass, PassSummary, RowState, Schedule

ROUNDING = 1e-9
"""Subtracted before rounding up: 0.07 of 100 rows are 7, but the product in float64 is a little more."""


class EMStar(BuiltInPolicy):
    """EM* (the paper's Procedure 2; Kurban, Jenne and Dalkilic 2016).

    The active rows of each component are put in a max-heap by their
    responsibility for it, in row order; the heap's leaves stay active. The
    active set never grows and never empties.

    Parameters
    ----------
    tail : {"leaves"} or float in (0, 1], default="leaves"
        A number t keeps, for each component, the ``ceil(t·n)`` rows of lowest
        responsibility instead of the leaves (the paper's first variant,
        section 4.2).
    every : int, default=1
        The active set shrinks only after iterations divisible by ``every`` (the
        paper's second variant).

    Notes
    -----
    Heaps are per chunk, so with several chunks the fit depends on the
    chunking; on one chunk it is the paper's. ``converged_`` does not imply a
    stationary point of the log-likelihood.
    """

    constraints: ClassVar = {"tail": either(choice("leaves"), FRACTION), "every": integer(1)}

    def __init__(self, tail: str | float = "leaves", every: int = 1) -> None:
        self.tail = tail
        self.every = every

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Keep each component's tail active, in iterations divisible by ``every``."""
        n = len(evidence.labels)
        if evidence.iteration % self.every:
            return state, np.ones(n, dtype=np.bool_)
        stays = np.zeros(n, dtype=np.bool_)
        for component in np.unique(evidence.labels):
            members = np.flatnonzero(evidence.labels == component)
            stays[members[self._tail(evidence.responsibilities[members])]] = True
        return state, stays

    def _tail(self, responsibilities: NDArray[np.float64]) -> NDArray[np.intp]:
        n = len(responsibilities)
        if not isinstance(self.tail, str):
            lowest = np.argsort(responsibilities, kind="stable")
            return lowest[: math.ceil(self.tail * n - ROUNDING)]
        heads_first = np.argsort(-responsibilities, kind="stable")
        rank = np.empty(n, dtype=np.intp)
        rank[heads_first] = np.arange(n)
        return heads_first[heapify(rank)[n // 2 :]]

    def schedule(self, summary: PassSummary) -> Schedule:
        """Score the active rows; tol is tested after every iteration."""
        return Schedule(NextPass.ACTIVE, test_tol=True)


def heapify(keys: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return distinct ``keys`` as the min-heap that Floyd's bottom-up construction makes of them.

    Parameters
    ----------
    keys : ndarray of shape (n,)
        In insertion order.

    Returns
    -------
    ndarray of shape (n,)
        Node i has children 2i+1 and 2i+2.

    Notes
    -----
    The same array as ``heapq.heapify``'s. Subtrees of one depth do not touch,
    so all nodes of a depth sift down together, as array operations.
    """
    n = len(keys)
    heap = np.append(keys, np.iinfo(np.intp).max)
    depth = max(n // 2, 1).bit_length() - 1
    for level in range(depth, -1, -1):
        first = 2**level - 1
        nodes = np.arange(first, min(2 * first + 1, n // 2))
        while len(nodes):
            left = 2 * nodes + 1
            right = np.minimum(left + 1, n)
            child = np.where(heap[right] < heap[left], right, left)
            sinks = heap[child] < heap[nodes]
            nodes, child = nodes[sinks], child[sinks]
            heap[nodes], heap[child] = heap[child], heap[nodes]
            nodes = child[child < n // 2]
    return heap[:n]
