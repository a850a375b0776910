"""A bounded random sample of any data, for pictures and reports of a fitted mixture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emtau_dask.data.opening import as_source
from emtau_dask.em.fit import FitSources, open_context
from emtau_dask.em.history import FitObserver, SilentObserver
from emtau_dask.em.predict import imputation
from emtau_dask.em.problem import check_counts, make_problem
from emtau_dask.em.sampling import sample_rows
from emtau_dask.errors import features_named
from emtau_dask.estimator.inputs import (
    FeatureChoice,
    checked_array,
    checked_lazy,
    opened_data,
    row_values_source,
)
from emtau_dask.estimator.prediction import FittedMixture
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.workers import resident, shared_source, verify_access
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Floats
from emtau_dask.settings import MARGINALISE, missing_values

MAX_VALUES = 2**23
"""Maximum number of values of a sample (64 MiB). If there are many features, fewer rows are drawn."""


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """Rows drawn at random, without replacement.

    Attributes
    ----------
    rows : ndarray of shape (m, d), float64
    weights : ndarray of shape (m,), float64
        Their sample weights; 1 if there are none.
    total : int
        Number of rows that they were drawn from: those of positive weight that are not dropped.
    imputed : float
        Share of the values that were missing and are replaced by their expectations.
    """

    rows: Floats
    weights: Floats
    total: int
    imputed: float = 0.0


def drawn_rows(
    estimator: FittedMixture,
    X: Any,
    *,
    size: int,
    seed: int,
    sample_weight: Any = None,
    columns: Any = None,
    observer: FitObserver | None = None,
) -> DrawnRows:
    """Draw rows of data with the features of a fitted mixture; each chunk is read at most once.

    If NaN is a missing value for the mixture, it is replaced by its expectation. Rows with NaN that the
    mixture drops are not drawn.

    Parameters
    ----------
    estimator : GaussianMixture
        Fitted.
    X, sample_weight, columns
        As for `GaussianMixture.fit`; columns by default those of the fit.
    size : int
        Number of rows to draw, at most `MAX_VALUES` values. If there are fewer rows, all in random order.
    seed : int
        The same seed draws the same rows under any chunking.
    observer : FitObserver, optional
        Is notified of the passes.

    Raises
    ------
    InvalidDataError
        The data cannot be read, have other features, have no rows, or a drawn row holds NaN or infinity.
    """
    missing = missing_values(estimator.missing)
    names = getattr(estimator, "feature_names_in_", None)
    opened = opened_data(X, FeatureChoice(columns), names, fitted_array=estimator._array)
    lazy = checked_lazy(estimator, opened)
    checked = checked_array(estimator, opened, reset=False) if lazy is None else lazy
    rows = as_source(checked, ndim=2, what="X")
    weights = row_values_source(sample_weight, ndim=1, what="sample_weight")
    check_counts(rows, weights, 1)
    structure, executor = estimator.parameters_.structure, choose_executor()
    client = executor.client
    if weights is not None:
        weights = shared_source(client, weights.aligned(rows.chunk_rows), "sample_weight")
    with (
        resident(client, shared_source(client, rows, "X")) as resident_rows,
        resident(client, weights) as resident_weights,
        open_context(executor, observer or SilentObserver()) as context,
        features_named(names),
    ):
        verify_access(client, None, FitSources(resident_rows, resident_weights).named())
        problem = make_problem(
            resident_rows,
            resident_weights,
            1,
            structure,
            executor,
            context,
            compiled=False,
            missing=missing,
        )
        size = max(1, min(size, MAX_VALUES // problem.n_features))
        sample = sample_rows(problem, seed, size)
    drawn = DrawnRows(sample.rows, sample.weights, problem.n_rows)
    return _impute(estimator, drawn) if missing == MARGINALISE else drawn


def _impute(estimator: FittedMixture, drawn: DrawnRows) -> DrawnRows:
    """Return the rows with expected values in place of missing ones."""
    parameters = estimator.parameters_
    kernels = scoring_kernels(parameters, compiled=False, missing=True)
    rows = imputation(parameters.n_features)(drawn.rows, kernels, missing=MARGINALISE)
    return replace(drawn, rows=rows, imputed=float(np.isnan(drawn.rows).mean()))
