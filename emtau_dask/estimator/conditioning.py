"""Marginal and conditional mixtures of a fitted mixture, and the imputation of missing values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from emtau_dask.constraints import integer, number
from emtau_dask.data.cubes import is_labelled
from emtau_dask.em.history import FitHistory
from emtau_dask.em.predict import RESPONSIBILITIES, conditional_means, imputation
from emtau_dask.errors import InvalidDataError, UnusableRowError, counted, did_you_mean, short
from emtau_dask.estimator.inputs import FeatureChoice
from emtau_dask.estimator.prediction import FittedMixture
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Ints
from emtau_dask.mixture.missing import Conditioning
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.settings import MARGINALISE, OF_ONE_FIT, RAISE


class ConditionedMixture(FittedMixture):
    """The methods of `GaussianMixture` that divide its features into given ones and the others."""

    def marginal(self, features: Any) -> Self:
        """Return the marginal mixture of some features.

        Parameters
        ----------
        features : sequence of int or str
            Numbers of features, or their names if the fit had names, in the order of the new mixture.

        Returns
        -------
        GaussianMixture
            Fitted, with the same components in the same order. Its ``history_`` is empty, ``lower_bound_``
            is -inf and ``gap_`` NaN; ``stop_reason_`` and ``converged_`` are those of the fit.

        Raises
        ------
        InvalidDataError
            ``features`` is empty, or has an unknown or a repeated feature.
        """
        check_is_fitted(self)
        given = self._numbers_of(features)
        return self._of_features(Conditioning(self.parameters_, given).marginal, given)

    def condition(self, given: Any, values: Any = None) -> Self:
        """Return the conditional mixture of the other features, given the values of some.

        Parameters
        ----------
        given : mapping of int or str to float, or sequence of int or str
            The known features with their values, or a sequence of features whose values are ``values``.
            Features are numbers, or names if the fit had names.
        values : array-like of shape (n_given,), optional
            The values for a sequence of features, in its order.

        Returns
        -------
        GaussianMixture
            Fitted, of the features that are not given, in their order, with the same components in the same
            order. Its weights are the probabilities of the components under the given values, at least
            2.2e-308. For its other attributes see `marginal`.

        Raises
        ------
        InvalidDataError
            There are no given features, or no others; a feature is unknown or repeated; a value is not a
            finite number, or so far from every component that its density is 0 in float64.

        References
        ----------
        Bishop 2006, "Pattern Recognition and Machine Learning", eq. 2.81 and 2.82.

        Examples
        --------
        >>> import numpy as np
        >>> from emtau_dask import GaussianMixture
        >>> X = np.random.default_rng(0).normal(size=(1000, 3))
        >>> gm = GaussianMixture(2, random_state=0).fit(X)
        >>> gm.condition({0: 1.5}).means_.shape
        (2, 2)
        """
        check_is_fitted(self)
        features, row = _features_and_values(given, values)
        conditioning = self._conditioning(features)
        try:
            scored = RESPONSIBILITIES(row[np.newaxis], scoring_kernels(conditioning.marginal, compiled=False))
        except UnusableRowError as error:
            raise InvalidDataError(
                f"the given values {short(row.tolist())} are too large, or so far from every component that "
                "their density is 0 in float64. Give values nearer to the data."
            ) from error
        return self._of_features(conditioning.at(row, scored[0]), conditioning.rest)

    def conditional_mean(self, X: Any, features: Any = None, *, columns: Any = None) -> Any:
        """Return the expected values of the other features, given some features of many rows.

        This is Gaussian mixture regression (Ghahramani and Jordan 1994, "Supervised learning from incomplete
        data via an EM approach", section 4). It has the least mean squared error under the mixture of all
        functions of the given features.

        Parameters
        ----------
        X : dask array, zarr array or array-like of shape (n_samples, n_given), or str
            The known features, a column each. A str is the path or URL of stored rows, as for
            `GaussianMixture.fit`.
        features : sequence of int or str, optional
            The features that the columns of X are, in their order. By default the names of X's columns, if X
            has columns and the fit had names.
        columns : sequence of str, optional
            Columns of parquet or CSV; by default those with the names of ``features``.

        Returns
        -------
        ndarray, or lazy dask array for dask, zarr and paths, of shape (n_samples, n_rest), float64
            The features that are not given, in their order. For xarray data a DataArray, with their names
            along its last dimension, "feature".

        Raises
        ------
        InvalidDataError
            There are no given features, or no others; a feature is unknown or repeated; X has another number
            of columns. For rows with NaN or infinity it is raised when they are computed.
        """
        check_is_fitted(self)
        if features is None:
            features = getattr(X, "columns", None)
            if features is None or not hasattr(self, "feature_names_in_"):
                raise InvalidDataError(
                    "features is None, but X has no names of columns, or the fit had none. Name the given "
                    "features, such as features=[0, 2]."
                )
        conditioning = self._conditioning(features)
        marginal = self._of_features(conditioning.marginal, conditioning.given)
        called = "conditional_mean", "feature"
        found = marginal._labelled_scores(
            X, conditional_means(conditioning), FeatureChoice(columns), called, missing=RAISE
        )
        if is_labelled(found):
            found = found.assign_coords(feature=self.feature_names_in_[conditioning.rest])
        return found

    def impute(self, X: Any, *, columns: Any = None) -> Any:
        """Return rows with expected values in place of missing ones, which are NaN.

        A missing value becomes its expectation given the other values of its row; see `conditional_mean`. A
        row without any value becomes the mean of the mixture. Other values are not changed.

        Parameters
        ----------
        X : dask array, zarr array or array-like of shape (n_samples, n_features), or str
            As for `predict`.
        columns : sequence of str, optional
            Columns of parquet or CSV; by default those of the fit, if it had names.

        Returns
        -------
        ndarray, or lazy dask array for dask, zarr and paths, of shape (n_samples, n_features), float64
            For xarray data a DataArray, whose last dimension is that of the features, with its labels, or
            "feature" with the names of variables.
        """
        check_is_fitted(self)
        called = "imputed", None
        return self._labelled_scores(
            X, imputation(self.n_features_in_), FeatureChoice(columns), called, missing=MARGINALISE
        )

    def _conditioning(self, features: Any) -> Conditioning:
        given = self._numbers_of(features)
        if len(given) == self.n_features_in_:
            raise InvalidDataError(
                f"all {counted(len(given), 'feature')} given: none is left. Remove one or more of them."
            )
        return Conditioning(self.parameters_, given)

    def _numbers_of(self, features: Any) -> Ints:
        """Return the numbers of features that are given by numbers or names; raises `InvalidDataError`."""
        if isinstance(features, (str, Mapping)) or not np.iterable(features):
            raise InvalidDataError(
                f"features = {short(features)} must be a list of numbers or names of features, such as "
                "[0, 2]."
            )
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        numbers = [_number_of(feature, names, self.n_features_in_) for feature in features]
        if not numbers:
            raise InvalidDataError("no feature is given; give at least one.")
        twice = next((number for number in numbers if numbers.count(number) > 1), None)
        if twice is not None:
            raise InvalidDataError(
                f"feature {short(names[twice]) if names else twice} is given twice; give each feature once."
            )
        return np.array(numbers, dtype=np.intp)

    def _of_features(self, parameters: MixtureParameters, features: Ints) -> Self:
        """Return a fitted mixture of ``features`` of this one, with its settings."""
        own = {"n_components": parameters.n_components, "covariance_type": parameters.covariance_type}
        others = self.get_params(deep=False) | dict.fromkeys(OF_ONE_FIT) | {"warm_start": False}
        mixture = type(self)(**others | own)
        names = self.feature_names_in_[features] if hasattr(self, "feature_names_in_") else None
        mixture._publish(parameters, FitHistory(()), self.stop_reason_, names)
        return mixture


def _number_of(feature: Any, names: Sequence[str], n_features: int) -> int:
    if integer(0, n_features - 1).holds(feature):
        return int(feature)
    if isinstance(feature, str) and feature in names:
        return names.index(feature)
    if isinstance(feature, str) and not names:
        raise InvalidDataError(
            f"there is no feature {short(feature)}: the data of the fit had no names of features. Give "
            f"numbers, 0 to {n_features - 1}."
        )
    listed = f"names are {short(list(names))}, the numbers" if names else "numbers are"
    near = did_you_mean(feature, names)
    raise InvalidDataError(f"there is no feature {short(feature)}; the {listed} 0 to {n_features - 1}.{near}")


def _features_and_values(given: Any, values: Any) -> tuple[list[Any], Any]:
    """Return features and their values (g,), from a mapping or two sequences; raises `InvalidDataError`."""
    if isinstance(given, Mapping):
        if values is not None:
            raise InvalidDataError("given is a mapping with values, so `values` must be None; remove one.")
        features, numbers = list(given), list(given.values())
    elif values is None or isinstance(given, str) or not np.iterable(given):
        raise InvalidDataError(
            "condition needs features and their values: condition({0: 1.5, 2: 0.3}), or "
            "condition([0, 2], values=[1.5, 0.3])."
        )
    else:
        features, numbers = list(given), np.ravel(values).tolist()
        if np.ndim(values) != 1 or len(numbers) != len(features):
            raise InvalidDataError(
                f"values has the shape {np.shape(values)}, but {len(features)} features are given: give one "
                "value for each. For many rows use conditional_mean."
            )
    for feature, value in zip(features, numbers, strict=True):
        if not number(-math.inf).holds(value):
            raise InvalidDataError(
                f"feature {short(feature)} is given as {short(value)}; it must be a finite number. Remove a "
                "feature whose value is unknown."
            )
    return features, np.array(numbers, dtype=np.float64)
