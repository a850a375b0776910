"""Sums of symmetric matrices, of which upper triangles are at hand.

Passes over a large (K, d, d) array cost as much as the memory that they read and write. Upper triangles are
half of it. Where the work goes strip by strip, all steps are done while a strip is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emtau_dask.mixture.numerics.arrays import EPS, SIDE, Bools, Floats, read_only, symmetrised


def strips_of(n_features: int) -> Iterator[slice]:
    """Yield the rows of each strip of a matrix of so many features."""
    for begin in range(0, n_features, SIDE):
        yield slice(begin, min(begin + SIDE, n_features))


def write_mirrored(strip: Floats, rows: slice, out: Floats) -> None:
    """Write a strip (m, d - begin) of a symmetric matrix (d, d), and its mirror image."""
    out[rows, rows.start :] = strip
    out[rows.stop :, rows] = strip[:, len(strip) :].T
    _mirror(out[rows, rows])


def mirror_squares(matrix: Floats) -> None:
    """Make the squares on the diagonal of a matrix (d, d) symmetric; each strip begins with one."""
    for rows in strips_of(len(matrix)):
        _mirror(matrix[rows, rows])


def _mirror(square: Floats) -> None:
    np.copyto(square, square.T, where=np.tri(len(square), k=-1, dtype=np.bool_))


@dataclass(frozen=True, eq=False)
class Triangles:
    """Symmetric matrices ``Σ_j parts_j + Σ_i weights_i · vectors_i vectors_iᵀ``, K of them.

    Attributes
    ----------
    parts : tuple of ndarray of shape (K, d, d)
        One or more, of which the strips count: what is right of their diagonals, and squares on them.
    weights : ndarray of shape (m, K)
    vectors : ndarray of shape (m, K, d)
        Outer products that are below the rounding of the parts are left out.
    """

    parts: tuple[Floats, ...]
    weights: Floats
    vectors: Floats

    @cached_property
    def _count(self) -> Bools:
        """Which outer products count, (m, K)."""
        diagonal = sum(np.einsum("kii->ki", part) for part in self.parts)
        squares = self.weights[:, :, np.newaxis] * self.vectors**2
        count: Bools = (np.abs(squares) > 0.25 * EPS * diagonal).any(axis=2)
        return count

    def write_strip(self, k: int, rows: slice, out: Floats) -> None:
        """Write a strip of matrix k, (m, d - begin)."""
        columns = slice(rows.start, None)
        first, *others = (part[k, rows, columns] for part in self.parts)
        if others:
            np.add(first, others[0], out=out)
        else:
            out[...] = first
        for other in others[1:]:
            out += other
        counting = self._count[:, k]
        if counting.any():
            vectors = self.vectors[counting, k]
            out += (self.weights[counting, k, np.newaxis] * vectors[:, rows]).T @ vectors[:, columns]

    @cached_property
    def upper(self) -> Floats:
        """Matrices (K, d, d) of which the strips are the sums; the rest does not count."""
        if len(self.parts) == 1 and not self._count.any():
            return self.parts[0]
        out = np.empty_like(self.parts[0])
        for k, matrix in enumerate(out):
            self._write_strips(k, matrix)
        return read_only(out)

    def whole(self) -> Floats:
        """Return the matrices, (K, d, d)."""
        out = np.empty_like(self.parts[0])
        for k, matrix in enumerate(out):
            self._write_strips(k, matrix)
            symmetrised(matrix)
        return out

    def _write_strips(self, k: int, out: Floats) -> None:
        for rows in strips_of(len(out)):
            self.write_strip(k, rows, out[rows, rows.start :])
