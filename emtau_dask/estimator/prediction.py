"""The methods of a fitted mixture: prediction, scores, samples, the summary, saving and loading."""

from __future__ import annotations

import math
from copy import copy
from itertools import accumulate, chain
from typing import Any, Self

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.layers import ArrayValuesDep
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.utils.validation import check_is_fitted

from emtau_dask.constraints import integer
from emtau_dask.data.cubes import Cube
from emtau_dask.data.opening import as_dask, as_source
from emtau_dask.em.history import FitHistory
from emtau_dask.em.predict import (
    LABELS,
    LOG_LIKELIHOODS,
    RESPONSIBILITIES,
    Scoring,
    kernels_to_score,
    score_rows,
)
from emtau_dask.em.settings import DEFAULT_TOL
from emtau_dask.errors import InvalidDataError, features_named
from emtau_dask.estimator.frames import COMPONENT, as_frame, checked_output
from emtau_dask.estimator.inputs import (
    BY_DEFAULT,
    FeatureChoice,
    Seeds,
    checked_array,
    checked_lazy,
    opened_data,
)
from emtau_dask.estimator.model_file import load_model, save_model
from emtau_dask.estimator.summary import FitSummary, summary_of
from emtau_dask.execution.choice import compute_collections, here
from emtau_dask.execution.dask_graph import warn_without_workers
from emtau_dask.execution.scheduler import active_client
from emtau_dask.execution.workers import shared_data
from emtau_dask.kernels.dispatch import RowKernels
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.linalg import read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.process import documentation, threads_side_by_side
from emtau_dask.settings import DROP, RAISE, STORED, missing_values

_MATRICES = ("covariances_", "precisions_", "precisions_cholesky_")
"""Fitted attributes whose shapes depend on the covariance type."""
_COPIED: tuple[str, ...] = ("weights_", "means_", "n_features_in_", "feature_names_in_")
_COPIED += ("converged_", "n_iter_", "lower_bound_", "lower_bounds_")
"""Fitted attributes that scikit-learn's mixture has in the same form."""


class FittedMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """The methods of `GaussianMixture` that need a fit; its base class."""

    _doc_link_module = "emtau_dask"
    _array: str | None = None
    """The variable of a cube that has the features of the fit along a dimension."""

    @property
    def _doc_link_template(self) -> str:
        """Return the form of the link that scikit-learn shows in a notebook; see `documentation`."""
        return f"{documentation()}/api/emtau_dask.{{estimator_name}}.html"

    def _get_doc_link(self) -> str:
        return str(super()._get_doc_link()) if documentation() else ""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != RAISE
        return tags

    @property
    def parameters_(self) -> MixtureParameters:
        """The fitted parameters as one frozen record."""
        check_is_fitted(self)
        arrays = (self.weights_, self.means_, self.covariances_, self.precisions_cholesky_)
        return MixtureParameters(self._fitted_type, *map(read_only_copy, arrays))

    @property
    def _names(self) -> tuple[str, ...] | None:
        """The names of the features as texts; None if the fit had none."""
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else tuple(str(name) for name in names)

    def _publish(
        self, parameters: MixtureParameters, history: FitHistory, stop_reason: str, names: Any = None
    ) -> None:
        """Set the fitted attributes; if ``names`` is None, ``feature_names_in_`` stays as it is."""
        self.n_features_in_ = parameters.n_features
        if names is not None:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        self._fitted_type = parameters.covariance_type
        self.weights_ = np.array(parameters.weights)
        self.means_ = np.array(parameters.means)
        self.covariances_ = np.array(parameters.covariances)
        self.precisions_cholesky_ = np.array(parameters.precisions_cholesky)
        self.precisions_ = parameters.structure.precisions(parameters.precisions_cholesky)
        self.history_ = history
        self.n_iter_ = len(history)
        self.lower_bounds_ = [record.lower_bound for record in history]
        last = history.last_kept
        self.lower_bound_ = -np.inf if last is None else last.lower_bound
        self.gap_ = math.nan if last is None else last.gap
        self.stop_reason_ = stop_reason
        self.converged_ = stop_reason == "tol"

    def _score(
        self, X: Any, scoring: Scoring, chosen: FeatureChoice = BY_DEFAULT, *, missing: str | None = None
    ) -> Any:
        parameters = self.parameters_
        missing = missing_values(self.missing) if missing is None else missing
        names, by_pattern = getattr(self, "feature_names_in_", None), scoring.by_pattern
        X = opened_data(X, chosen, names, fitted_array=self._array)
        lazy = checked_lazy(self, X)
        if lazy is None:
            rows = checked_array(self, X, reset=False)
            kernels = kernels_to_score(None, parameters, len(rows), missing=missing, by_pattern=by_pattern)
            if not kernels.by_tiles:
                return scoring(rows, kernels, names, missing)
            with features_named(names):
                return _scored_by_tiles(rows, kernels, scoring, missing)
        client = active_client()
        array = as_dask(shared_data(client, lazy, "X")).rechunk({1: -1})
        kernels = kernels_to_score(client, parameters, array.shape[0], missing=missing, by_pattern=by_pattern)
        token = tokenize(scoring, parameters, array.name, names, missing, kernels.by_tiles)
        return _scored_lazily(array, kernels, scoring, names, missing, f"{scoring.__name__}-{token}")

    def _labelled_scores(
        self,
        X: Any,
        scoring: Scoring,
        chosen: FeatureChoice,
        called: tuple[str, str | None],
        *,
        missing: str | None = None,
    ) -> Any:
        """Return what `_score` returns, as a DataArray for cubes.

        ``called`` are the name of the DataArray, and that of its dimension that is not one of the rows; None
        for the dimension of the features.
        Warns if the result is lazy and the cluster has no workers.
        """
        X = opened_data(X, chosen, getattr(self, "feature_names_in_", None), fitted_array=self._array)
        values = self._score(X, scoring, missing=missing)
        if isinstance(values, da.Array):
            warn_without_workers(active_client(), "computing what this call returns")
        if not isinstance(X, Cube):
            return values
        dropping = missing_values(self.missing if missing is None else missing) == DROP
        array = X.labelled(values, *called, may_lack=dropping)
        return array.copy(data=compute_collections(called[0], array.data)[0]) if X.in_memory else array

    def predict(self, X: Any, *, columns: Any = None, features: Any = None) -> Any:
        """Return the most probable component of each row.

        Parameters
        ----------
        X : dask array, zarr array or array-like of shape (n_samples, n_features), str, DataArray or Dataset
            A str is the path or URL of stored rows, as for `GaussianMixture.fit`.
        columns : sequence of str, optional
            Columns of parquet, CSV or a data frame; by default those of the fit, if it had names, or all of a
            frame.
        features : str or sequence of str, optional
            As for `GaussianMixture.fit`; by default the dimension or variables with the names of the fit.

        Returns
        -------
        ndarray, or lazy dask array for dask, zarr and paths, of shape (n_samples,), intp
            With ``missing="drop"``, -1 for a row with NaN. For a DataFrame of pandas, polars or dask a Series
            "label" with its index, unless `set_output` says "default". For xarray data a DataArray "labels"
            with the dimensions of the rows, their coordinates and chunks, lazy unless X is in memory; rows
            with NaN are NaN in it, and -1 when it is written to a file.
        """
        return self._predict_frame(X, LABELS, FeatureChoice(columns, features), "labels")

    def predict_proba(self, X: Any, *, columns: Any = None, features: Any = None) -> Any:
        """Return responsibilities, (n_samples, n_components) float64; arguments are those of `predict`.

        Arrays, also for a DataFrame unless `set_output` asks for frames; for xarray data a DataArray
        "probabilities" with one more dimension, ``"component"``.
        """
        return self._predict_frame(X, RESPONSIBILITIES, FeatureChoice(columns, features), "probabilities")

    def score_samples(self, X: Any, *, columns: Any = None, features: Any = None) -> Any:
        """Return log-likelihoods, (n_samples,) float64, nats; arguments are those of `predict`.

        An array, also for a DataFrame unless `set_output` asks for a Series, "score"; for xarray data a
        DataArray "scores".
        """
        return self._predict_frame(X, LOG_LIKELIHOODS, FeatureChoice(columns, features), "scores")

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose what `predict`, `predict_proba` and `score_samples` return for a DataFrame.

        Parameters
        ----------
        transform : {"default", "pandas", "polars"}, optional
            ``"pandas"`` and ``"polars"``: a Series or DataFrame of the library of X, with its index, a lazy
            one for a dask DataFrame; the columns are the components. ``"default"``: arrays. None changes
            nothing. If this is never set, ``sklearn.set_config(transform_output=...)`` decides; without
            either only labels are a Series.

        Returns
        -------
        self
        """
        if transform is not None:
            self._sklearn_output_config = {"transform": checked_output(transform)}
        return self

    def _predict_frame(self, X: Any, scoring: Scoring, chosen: FeatureChoice, name: str) -> Any:
        values = self._labelled_scores(X, scoring, chosen, (name, COMPONENT))
        return as_frame(self, X, values, name)

    def _log_likelihood(self, X: Any, chosen: FeatureChoice) -> tuple[float, int]:
        """Return the log-likelihood of X (nats) and the number of scored rows, in one pass."""
        values = self._score(X, LOG_LIKELIHOODS, chosen)
        if isinstance(values, da.Array):
            total, rows = compute_collections(
                "the score", da.nansum(values), values.map_blocks(_scored, dtype=np.intp).sum()
            )
        else:
            total, rows = np.nansum(values), _scored(values).sum()
        if rows == 0:
            complete = "" if missing_values(self.missing) != DROP else " without missing values"
            raise InvalidDataError(f"X has no rows{complete}; a score needs at least one.")
        return float(total), int(rows)

    def score(self, X: Any, y: Any = None, *, columns: Any = None, features: Any = None) -> float:
        """Return the mean log-likelihood of X, nats per row; a lazy X is computed."""
        total, rows = self._log_likelihood(X, FeatureChoice(columns, features))
        return total / rows

    def _n_parameters(self) -> int:
        return free_parameters(structure_named(self._fitted_type), *self.means_.shape)

    def bic(self, X: Any, *, columns: Any = None, features: Any = None) -> float:
        """Return the Bayesian information criterion on X; lower is better."""
        total, rows = self._log_likelihood(X, FeatureChoice(columns, features))
        return -2 * total + self._n_parameters() * float(np.log(rows))

    def aic(self, X: Any, *, columns: Any = None, features: Any = None) -> float:
        """Return the Akaike information criterion on X; lower is better."""
        total, _ = self._log_likelihood(X, FeatureChoice(columns, features))
        return -2 * total + 2 * self._n_parameters()

    def sample(self, n_samples: Any = 1) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """Draw rows from the fitted mixture, in order of component.

        Returns
        -------
        X : ndarray of shape (n_samples, n_features)
        y : ndarray of shape (n_samples,)
            Components.
        """
        check_is_fitted(self)
        if not integer(1).holds(n_samples):
            raise InvalidDataError(
                f"Invalid value for 'n_samples': {n_samples!r}. The sampling requires at least one sample; "
                "give an integer of at least 1."
            )
        generator = np.random.default_rng(Seeds(self.random_state).draw())
        counts = generator.multinomial(int(n_samples), self.weights_ / self.weights_.sum())
        structure = structure_named(self._fitted_type)
        rows = generator.standard_normal((int(n_samples), self.n_features_in_))
        labels = np.repeat(np.arange(len(counts)), counts)
        for k, mean in enumerate(self.means_):
            members = labels == k
            rows[members] = mean + structure.draw(rows[members], self.covariances_, k)
        return rows, labels

    def summary(self) -> FitSummary:
        """Return the components, and how the fit ended, as a record that is displayed as a table.

        Returns
        -------
        FitSummary
            ``components`` (weight, mean, standard deviations), ``stop_reason``, ``lower_bound``, ``gap``,
            ``work`` and others; ``print(gm.summary())`` in a terminal, ``gm.summary()`` in a notebook.
        """
        check_is_fitted(self)
        return summary_of(self)

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write the fitted model as a zarr group, without pickle.

        The settings are stored too; ``random_state`` only if it is None or an integer.

        Parameters
        ----------
        path : str, Path or zarr store
            A path or URL.
        overwrite : bool, default=False
            Replace a model at ``path``; nothing but a model is replaced. A local folder is replaced when the
            new one is complete; at a URL and in a zarr store the earlier model is removed first.

        Raises
        ------
        InvalidDataError
            ``path`` holds something that may not be replaced.
        StorageError
            Nothing can be written there.
        """
        check_is_fitted(self)
        save_model(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: Any) -> Self:
        """Read a model that `save` wrote; runs no code from it.

        Raises
        ------
        InvalidDataError
            ``path`` holds no model of this version.
        """
        model: Self = load_model(cls, path)
        return model

    def to_sklearn(self) -> SklearnMixture:
        """Return a fitted ``sklearn.mixture.GaussianMixture`` with the same parameters.

        Two covariance types are not in scikit-learn: ``"tied_diag"`` becomes ``"tied"`` with a
        diagonal matrix, and ``"tied_spherical"`` becomes ``"spherical"`` with equal variances.
        """
        check_is_fitted(self)
        structure, twin = structure_named(self._fitted_type), SklearnMixture()
        twin.set_params(**{name: getattr(self, name) for name in STORED if hasattr(twin, name)})
        tol = DEFAULT_TOL if isinstance(self.tol, str) else self.tol
        n_init = 1 if isinstance(self.n_init, str) else self.n_init
        twin.set_params(covariance_type=structure.scikit_learn_name, tol=tol, n_init=n_init)
        for name in _COPIED:
            if hasattr(self, name):
                setattr(twin, name, copy(getattr(self, name)))
        for name in _MATRICES:
            setattr(twin, name, copy(structure.for_scikit_learn(getattr(self, name), len(self.weights_))))
        return twin


def _scored_by_tiles(rows: NDArray[Any], kernels: RowKernels, scoring: Scoring, missing: str) -> NDArray[Any]:
    """Return the scores of rows in memory; their chunks are scored in parallel."""
    values = np.empty((len(rows), *scoring.row_shape(kernels.plan.parameters.n_components)), scoring.dtype)
    source, begin = as_source(rows, ndim=2, what="X"), 0
    with threads_side_by_side():
        for (part,) in chain.from_iterable(score_rows(source, kernels, [scoring], here(), missing=missing)):
            values[begin : begin + len(part)] = part
            begin += len(part)
    return values


def _scored_lazily(
    array: da.Array, kernels: RowKernels, scoring: Scoring, names: Any, missing: str, name: str
) -> da.Array:
    """Return the scores of a dask array, which has all features in one block, as a dask array ``name``.

    `dask.array.map_blocks` would copy each block to join it with others before its axis of features is
    dropped.
    """
    chunk_rows = array.chunks[0]
    starts = accumulate(chunk_rows[:-1], initial=0)
    places = {
        (chunk,): (chunk, None if math.isnan(start) else int(start)) for chunk, start in enumerate(starts)
    }
    shape = scoring.row_shape(kernels.plan.parameters.n_components)
    return da.blockwise(
        _score_block,
        "ik"[: 1 + len(shape)],
        *(scoring, None, kernels, None, names, None, missing, None),
        *(ArrayValuesDep((chunk_rows,), places), "i", array, "ij"),
        new_axes=dict(zip("k", shape, strict=False)),
        name=name,
        align_arrays=False,
        dtype=scoring.dtype,
        meta=np.empty((0,) * (1 + len(shape)), scoring.dtype),
    )


def _score_block(
    scoring: Scoring,
    kernels: RowKernels,
    names: Any,
    missing: str,
    place: tuple[int, int | None],
    blocks: list[Any],
) -> NDArray[Any]:
    """Return the values of the rows of a chunk; its only block comes in a list."""
    (rows,) = blocks
    return scoring(rows, kernels, names, missing, place)


def _scored(values: NDArray[np.float64]) -> NDArray[np.intp]:
    return (~np.isnan(values)).astype(np.intp)
