"""Scoring rows with a fitted mixture, block by block: labels, responsibilities, log-likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import features_named
from emtau_dask.io.sources import check_dense
from emtau_dask.mixture.estep import LONGER, KernelPlan, Observed, PatternKernels
from emtau_dask.mixture.model import Conditioning, most_probable
from emtau_dask.rows import LoadedChunk


@dataclass(frozen=True)
class Scoring:
    """One thing to compute for every row.

    Attributes
    ----------
    name : str
    pick : callable (Observed) -> ndarray
        Of n rows with the same features missing, or with all.
    dtype : dtype
    row_shape : callable (K) -> tuple of int
        The shape of one row's values.
    """

    name: str
    pick: Callable[[Observed], NDArray[Any]]
    dtype: np.dtype[Any]
    row_shape: Callable[[int], tuple[int, ...]]

    @property
    def __name__(self) -> str:
        """What dask calls the tasks."""
        return f"emtau-{self.name}"

    def __call__(
        self,
        rows: NDArray[Any],
        plan: KernelPlan,
        names: Sequence[str] | None = None,
        missing: bool = False,
        block_info: Any = None,
    ) -> NDArray[Any]:
        """Return it for ``rows`` (n, d), see `score_chunk`; ``missing`` says whether NaN is a missing value.

        The ``names`` of the features and ``block_info``, which is dask's, are for messages.
        """
        start: int | None = 0
        chunk = 0
        if block_info:
            chunk = block_info[0]["chunk-location"][0]
            location = block_info[0]["array-location"][0][0]
            start = None if np.isnan(location) else int(location)
        check_dense(rows, chunk)
        loaded = LoadedChunk(rows, None, None, start, rows.nbytes, chunk, missing=missing)
        with features_named(names):
            return score_chunk(loaded, plan, [self])[0]


def score_chunk(loaded: LoadedChunk, plan: KernelPlan, scorings: Sequence[Scoring]) -> list[NDArray[Any]]:
    """Return an array (n,) or (n, K) for each of ``scorings``, from one pass by a plan for float64.

    Raises
    ------
    UnusableRowError
        A row holds NaN, infinity or a number too large to be squared, or is
        beyond the reach of every component.
    """
    n_components, n_rows = plan.parameters.n_components, len(loaded.rows)
    results = [np.empty((n_rows, *scoring.row_shape(n_components)), scoring.dtype) for scoring in scorings]
    positions = loaded.positions()
    kernels = PatternKernels(plan, longer=LONGER if loaded.missing else 1)
    kernel = kernels.made(len(positions))
    for where, rows in loaded.blocks(positions, kernel.n_rows):
        for found in kernel.observed(rows):
            loaded.check_reach(positions[where][found.places], found)
            for scoring, result in zip(scorings, results, strict=True):
                result[where][found.places] = scoring.pick(found)
    return results


def _one_value(n_components: int) -> tuple[int, ...]:
    return ()


def _one_each(n_components: int) -> tuple[int, ...]:
    return (n_components,)


def _labels(found: Observed) -> NDArray[Any]:
    return most_probable(found.responsibilities)[0].astype(np.intp)


def _responsibilities(found: Observed) -> NDArray[Any]:
    return found.responsibilities.T


def _log_likelihoods(found: Observed) -> NDArray[Any]:
    return found.log_likelihoods


def _imputed(found: Observed) -> NDArray[Any]:
    """Return the rows with the expected values of what they lack."""
    if found.conditioning is None:
        return found.rows
    completed = np.empty((len(found.rows), found.conditioning.parameters.n_features))
    completed[:, found.conditioning.given] = found.rows
    completed[:, found.conditioning.rest] = found.conditioning.means(found.rows, found.responsibilities)
    return completed


@dataclass(frozen=True)
class _ConditionalMeans:
    """The expected values of the features that are not given; see `Conditioning.means`."""

    conditioning: Conditioning

    def __call__(self, found: Observed) -> NDArray[Any]:
        return self.conditioning.means(found.rows, found.responsibilities)

    def row_shape(self, n_components: int) -> tuple[int, ...]:
        return self.conditioning.rest.shape


@dataclass(frozen=True)
class _Inliers:
    """-1 for rows whose log-likelihood is below a threshold, else 1."""

    threshold: float

    def __call__(self, found: Observed) -> NDArray[Any]:
        return np.where(found.log_likelihoods < self.threshold, -1, 1)


def inliers(threshold: float) -> Scoring:
    """Return the scoring of rows as outliers, -1, where their log-likelihood is below a threshold, or 1."""
    return Scoring("inliers", _Inliers(threshold), np.dtype(np.int8), _one_value)


def conditional_means(conditioning: Conditioning) -> Scoring:
    """Return the scoring of rows of given features by the expected values of the rest, (n, r)."""
    pick = _ConditionalMeans(conditioning)
    return Scoring("conditional-means", pick, np.dtype(np.float64), pick.row_shape)


def imputation(n_features: int) -> Scoring:
    """Return the scoring of rows by themselves, with expected values in the place of missing ones, (n, d)."""
    return Scoring("imputed", _imputed, np.dtype(np.float64), partial(_row_of, n_features))


def _row_of(n_features: int, n_components: int) -> tuple[int, ...]:
    return (n_features,)


LABELS = Scoring("labels", _labels, np.dtype(np.intp), _one_value)
RESPONSIBILITIES = Scoring("responsibilities", _responsibilities, np.dtype(np.float64), _one_each)
LOG_LIKELIHOODS = Scoring("log-likelihoods", _log_likelihoods, np.dtype(np.float64), _one_value)
