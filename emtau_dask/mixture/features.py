"""Features of the rows in which the log-densities of all components are linear.

The log-density of a Gaussian is linear in a few features of a row, such as ``[1, y, y_i y_j (i ≤ j)]``. The
E-step of a block is therefore one product ``W φ`` of K coefficient rows with the block's features, and its
statistics are another, ``R φᵀ``, with the responsibilities. Both use the symmetry of ``y yᵀ``. The record of
a covariance type says which features it needs.

The price is cancellation: a squared distance is a difference of terms as large as the squared distance from
the origin of the coordinates. Coordinates are therefore those of a `Frame`, and `conditions` says how many
digits a component loses there. If one loses too many, the centred form is used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.linalg import Floats, read_only, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics, quotients


def _means_in(parameters: MixtureParameters, frame: Frame) -> Floats:
    return frame.vectors(parameters.means - frame.centre)


def coefficients(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return W, (K, F), such that ``W φ`` are the weighted log-densities of rows in the frame."""
    return parameters.structure.coefficients(
        parameters.log_scales, _means_in(parameters, frame), parameters.precisions_cholesky, frame
    )


def statistics_of_moments(
    structure: CovarianceStructure, frame: Frame, moments: Moments
) -> SufficientStatistics:
    """Return the statistics of the rows whose ``moments`` in the frame are given."""
    sums = moments[0]
    weights = sums[:, 0].copy()
    means = quotients(sums[:, 1 : 1 + len(frame.centre)], weights[:, np.newaxis])
    scatter = structure.scatter(moments, weights, means, frame)
    places = np.where(weights[:, np.newaxis] > 0, frame.centre + frame.vectors_back(means), 0.0)
    return SufficientStatistics(read_only(weights), read_only(places), read_only_copy(scatter))


def incomplete_coefficients(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return W, (K, 1 + 3 d), for features ``[1, o y, o y², o]`` of rows with missing values.

    o is 1 for values that a row has, and 0 for others. The features of each component are independent.
    """
    means = _means_in(parameters, frame)
    variances = parameters.structure.variances(parameters.covariances, *means.shape)
    of_known = np.log(2.0 * np.pi * variances) + means**2 / variances
    parts = np.log(parameters.weights)[:, np.newaxis], means / variances, -0.5 / variances, -0.5 * of_known
    return np.hstack(parts)


def statistics_of_incomplete(
    parameters: MixtureParameters, frame: Frame, sums: Floats
) -> SufficientStatistics:
    """Return the expected statistics of the rows with sums (K, 1 + 3 d) of such features.

    A missing value has the component's mean and variance, whatever the others are.
    """
    structure, before = parameters.structure, _means_in(parameters, frame)
    weights, (values, squares, known) = sums[:, 0].copy(), np.split(sums[:, 1:], 3, axis=1)
    missing = weights[:, np.newaxis] - known
    variances = structure.variances(parameters.covariances, *before.shape)
    means = quotients(values + missing * before, np.broadcast_to(weights[:, np.newaxis], before.shape))
    spread = squares + missing * (before**2 + variances) - weights[:, np.newaxis] * means**2
    scatter = np.zeros(structure.shape(*before.shape))
    structure.add_outer(scatter, np.ones((1, len(weights))), np.sqrt(np.maximum(0.0, spread))[np.newaxis])
    places = np.where(weights[:, np.newaxis] > 0, frame.centre + means, 0.0)
    return SufficientStatistics(read_only(weights), read_only(places), read_only(scatter))


def about_mean(parameters: MixtureParameters) -> Frame:
    """Return the frame about the mixture's mean whose coordinates are the rows' own."""
    return Frame(read_only_copy(parameters.weights @ parameters.means), None)


def frames_of(parameters: MixtureParameters) -> Iterator[Frame]:
    """Yield the frames worth trying about the mixture's mean, cheapest first: fixed functions of Θ."""
    centre = about_mean(parameters).centre
    for transform in parameters.structure.transforms(
        parameters.weights, parameters.covariances, parameters.precisions_cholesky
    ):
        yield Frame(centre, transform)


def conditions(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return ``g_k = κ(R_k) (1 + ρ_k)²``, shape (K,): the factor by which rounding errors grow.

    R_k is component k's correlation matrix in the frame, ρ_k the distance of its mean from the frame's
    origin in its own standard deviations. Log-densities and scatters (relative to the variances) have errors
    of about ``ε g_k``.
    """
    structure, means = parameters.structure, _means_in(parameters, frame)
    covariances = frame.forms(parameters.covariances)
    distances = np.sqrt((means**2 / structure.variances(covariances, *means.shape)).sum(axis=1))
    with np.errstate(over="ignore"):
        conditions: Floats = structure.conditions(covariances) * (1.0 + distances) ** 2
    return conditions
