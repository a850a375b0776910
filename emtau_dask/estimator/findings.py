"""What the parameters of a mixture say about its components: how sure rows are, and what is suspicious."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.predict import RESPONSIBILITIES
from emtau_dask.errors import counted, listed
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters

CERTAIN = 0.9
"""Minimum responsibility of a row's most probable component for a label that is called certain."""
DRAWS, DRAWS_PER_COMPONENT, MAX_PRODUCTS = 4096, 32, 2**27
"""Draws from a mixture that say how sure its labels are. There are fewer if scoring them takes more
multiplications than `MAX_PRODUCTS`, and none if there were too few for each component."""
NEARLY_EQUAL = 0.9
"""Minimum Bhattacharyya coefficient of two components that are called nearly equal; two normal distributions
of the same variance have it if their means are 0.92 standard deviations apart."""
MAX_VALUES, MAX_PAIRS = 2**27, 64
"""Maximum values of bounds on coefficients, and maximum pairs whose coefficient is computed."""
FLOOR_RATIO = 1.5
"""Minimum ratio of a variance to ``reg_covar``; a smaller variance mostly consists of ``reg_covar``."""
ROWS_PER_FEATURE = 2


def share_between_components(weights: Floats, means: Floats, variances: Floats) -> Floats:
    """Return the share of each feature's variance in the mixture that is between components, (d,).

    Parameters
    ----------
    weights : ndarray of shape (K,)
    means, variances : ndarray of shape (K, d)
    """
    between: Floats = weights @ (means - weights @ means) ** 2
    within: Floats = weights @ variances
    total = between + within
    return np.divide(between, total, out=np.zeros_like(total), where=total > 0)


def shown_features(shown: int, n_features: int, n_components: int) -> str:
    """Return which features of many are shown, for people: several components have best ones."""
    if n_components == 1:
        return f"the first {shown} of {n_features:,} features"
    return f"the {shown} of {n_features:,} features that separate components best"


def certain_shares(rows: Floats, weights: Floats, parameters: MixtureParameters) -> Floats:
    """Return the weighted share of the rows that each component labels, of (m, d), that are certain, (K,).

    NaN if it labels none.
    """
    k = parameters.n_components
    responsibilities = RESPONSIBILITIES(rows, scoring_kernels(parameters, compiled=False))
    labels: NDArray[np.intp] = responsibilities.argmax(axis=1)
    sure = responsibilities.max(axis=1) >= CERTAIN
    labelled = np.bincount(labels, weights, minlength=k)
    certain = np.bincount(labels, weights * sure, minlength=k)
    shares: Floats = np.divide(certain, labelled, out=np.full(k, np.nan), where=labelled > 0)
    return shares


def expected_certainty(parameters: MixtureParameters) -> Floats:
    """Return the share of each component's rows that are certain, estimated by draws from the mixture, (K,).

    The draws are always the same. NaN for a component that labels none, and for all if the mixture is too
    large to be drawn from in about a second.
    """
    k, d = parameters.means.shape
    m = min(DRAWS, MAX_PRODUCTS // (k * d * d))
    if m < DRAWS_PER_COMPONENT * k:
        return np.full(k, np.nan)
    generator = np.random.default_rng(0)
    counts = generator.multinomial(m, parameters.weights / parameters.weights.sum())
    drawn = [
        mean + parameters.structure.draw(generator.standard_normal((count, d)), parameters.covariances, i)
        for i, (mean, count) in enumerate(zip(parameters.means, counts, strict=True))
    ]
    return certain_shares(np.concatenate(drawn), np.ones(m), parameters)


def nearly_equal(parameters: MixtureParameters) -> list[tuple[int, int, float]]:
    """Return pairs of components whose Bhattacharyya coefficient is at least 0.9, the most equal first.

    The coefficient is ``∫ √(f g)``: 1 for equal densities, 0 for separate ones (Kailath 1967, IEEE Trans.
    Comm. 15, eq. 61, for normal distributions; Hennig 2010, Adv. Data Anal. Classif. 4, section 4.2, for
    components). That of one feature alone is never smaller, so most pairs need no matrix. Of very many
    components or pairs the heaviest, and those equal in each feature, are compared.
    """
    k, d = parameters.means.shape
    variances = parameters.structure.variances(parameters.covariances, k, d)
    some = np.argsort(-parameters.weights, kind="stable")[: max(2, math.isqrt(MAX_VALUES // d))]
    candidates = []
    for place, i in enumerate(some):
        others = some[place + 1 :]
        logs = _log_coefficient(
            parameters.means[others] - parameters.means[i], variances[others], variances[i]
        )
        bounds = np.exp(logs.min(axis=1, initial=0.0))
        candidates += [
            (float(bounds[n]), int(i), int(others[n])) for n in np.flatnonzero(bounds >= NEARLY_EQUAL)
        ]
    candidates = sorted(candidates, reverse=True)[:MAX_PAIRS]
    found = [(min(i, j), max(i, j), coefficient(parameters, i, j)) for _, i, j in candidates]
    return sorted((pair for pair in found if pair[2] >= NEARLY_EQUAL), key=lambda pair: -pair[2])


def _log_coefficient(differences: Floats, variances: Floats, others: Floats) -> Floats:
    """Return the logarithms of the Bhattacharyya coefficients of normal distributions on one feature."""
    both = variances + others
    logs: Floats = 0.5 * np.log(2 * np.sqrt(variances) * np.sqrt(others) / both) - differences**2 / (4 * both)
    return logs


def coefficient(parameters: MixtureParameters, i: int, j: int) -> float:
    """Return the Bhattacharyya coefficient of two components, from 0 to 1."""
    unit, draw = np.eye(parameters.n_features), parameters.structure.draw
    factors = np.concatenate([draw(unit, parameters.covariances, k) for k in (i, j)])
    # The mean covariance is FᵀF / 2; a triangular factor of it keeps more digits than it does itself.
    triangle: Floats = np.asarray(np.linalg.qr(factors / math.sqrt(2), mode="r"))
    away = np.linalg.solve(triangle.T, parameters.means[i] - parameters.means[j])
    log_det = np.log(np.abs(np.diagonal(triangle))).sum() + parameters.log_det[[i, j]].mean()
    return min(1.0, math.exp(-0.125 * float(away @ away) - float(log_det)))


def remarks_on(
    parameters: MixtureParameters, rows: int, reg_covar: float, names: Sequence[str]
) -> tuple[str, ...]:
    """Return what is suspicious about components, for people: few rows, constant features, equal pairs.

    ``rows`` is N (0 if unknown), ``names`` are those of the features.
    """
    k, d = parameters.means.shape
    remarks = []
    own = parameters.weights * rows
    if few := [f"{i} ({own[i]:.3g} rows)" for i in np.flatnonzero(own < ROWS_PER_FEATURE * (d + 1)) if rows]:
        remarks.append(
            f"few rows for {counted(d, 'feature')}: {_components(few)}. Covariances of so few "
            "rows are uncertain; fewer components or a simpler covariance type may be better."
        )
    variances = parameters.structure.variances(parameters.covariances, k, d)
    at_floor = variances < FLOOR_RATIO * reg_covar
    if constant := [f"{i}" for i in np.flatnonzero(at_floor.any(axis=1))]:
        flat = listed(compress(names, np.any(at_floor, axis=0)))
        remarks.append(
            f"hardly more variance than reg_covar = {reg_covar:g}: {_components(constant)} ({flat}). The "
            "rows there are nearly equal in such a feature."
        )
    if pairs := [f"{i} and {j} (overlap {overlap:.0%})" for i, j, overlap in nearly_equal(parameters)]:
        remarks.append(
            f"nearly equal: components {listed(pairs)}. Fewer components may describe the rows as well."
        )
    return tuple(remarks)


def _components(named: Sequence[str]) -> str:
    return f"component{'s' if len(named) > 1 else ''} {listed(named)}"
