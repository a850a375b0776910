"""The procedures f(·) that name the next active set: the paper's 1, 2 and 3, and its future work (revisits).

Each sees one `Step` after every iteration, keeps the history that it wants, and answers with a mask of the
rows, or with None where nothing is left to do.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Step:
    """What is known after iteration i: σ^[i] of Algorithm 2."""

    iteration: int
    responsibilities: np.ndarray  # N × K, held: an inactive row's are those of its last scoring
    active: np.ndarray  # N, the rows scored in this iteration
    present: np.ndarray  # N, the rows of weight > 0
    change: float  # F_i − F_{i−1}; infinity in iteration 1
    tol: float
    chunk_of: np.ndarray  # N, the chunk that holds the row

    @property
    def full(self):
        return np.array_equal(self.active, self.present)


class FullEM:
    """Algorithm 1: every row, always."""

    def begin(self, n):
        pass

    def tests_tol(self, step):
        return True

    def next_active(self, step):
        return step.present.copy()


class EMTau:
    """Procedure 1: a row leaves once it has kept its component for tau consecutive iterations."""

    def __init__(self, tau=20, revisit="on-empty"):
        self.tau, self.revisit = tau, revisit

    def begin(self, n):
        self.c = np.full(n, -1)  # no component before the first E-step
        self.m = np.zeros(n, dtype=int)  # m_0 = 0
        self.since = 0

    def tests_tol(self, step):
        return self.revisit is None or step.full

    def next_active(self, step):
        survivors = np.zeros_like(step.active)
        for row in np.flatnonzero(step.active):
            component = int(np.argmax(step.responsibilities[row]))  # ties: the lowest index
            self.m[row] = self.m[row] + 1 if component == self.c[row] else 1
            self.c[row] = component
            survivors[row] = self.m[row] < self.tau
        self.since += 1
        if self.revisit is None:
            return survivors if survivors.any() else None
        stalled = not step.full and step.tol > 0 and abs(step.change) < step.tol
        due = isinstance(self.revisit, int) and self.since >= self.revisit
        if stalled or due or not survivors.any():
            self.m[:] = 0
            self.since = 0
            return step.present.copy()
        return survivors


class EMStar:
    """Procedure 2: the leaves of one max-heap per component over the active members' own responsibility.

    The paper's two variants: `tail=t` keeps the ceil(t·n) lowest, `every=e` shrinks only after iterations
    divisible by e.
    """

    def __init__(self, tail="leaves", every=1):
        self.tail, self.every = tail, every

    def begin(self, n):
        pass

    def tests_tol(self, step):
        return True

    def next_active(self, step):
        if step.iteration % self.every:
            return step.active.copy()
        kept = np.zeros_like(step.active)
        members = {}
        for row in np.flatnonzero(step.active):
            component = int(np.argmax(step.responsibilities[row]))
            members.setdefault((step.chunk_of[row], component), []).append(int(row))
        for (_, component), rows in members.items():
            own = [float(step.responsibilities[row, component]) for row in rows]
            kept[self._tail(rows, own)] = True
        return kept

    def _tail(self, rows, own):
        if self.tail == "leaves":
            heap = [
                (-r, row) for r, row in zip(own, rows, strict=True)
            ]  # max-heap: the most bound at the head
            heapq.heapify(heap)
            return [row for _, row in heap[len(heap) // 2 :]]
        lowest = sorted((r, row) for r, row in zip(own, rows, strict=True))
        return [row for _, row in lowest[: max(1, math.ceil(self.tail * len(lowest)))]]


class EMLazy:
    """Procedure 3: 1, 1 + full_every, … are full; between them the rows not bound above the threshold.

    The paper's formula prints P_n > T for the active set, against its own text; this follows the text.
    """

    def __init__(self, threshold=0.99, full_every=5):
        self.threshold, self.full_every = threshold, full_every

    def begin(self, n):
        pass

    def tests_tol(self, step):
        return (step.iteration - 1) % self.full_every == 0

    def next_active(self, step):
        if step.iteration % self.full_every == 0:  # the next iteration is 1 + a multiple of full_every
            return step.present.copy()
        return step.present & (step.responsibilities.max(axis=1) <= self.threshold)
