"""The line or the plane on which rows and components are drawn: features, or principal axes of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import eigh

from emtau_dask.checks import integer
from emtau_dask.errors import InvalidDataError
from emtau_dask.estimator import DrawnRows, GaussianMixture
from emtau_dask.messages import short
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.mixture.numerics import Floats
from emtau_dask.plot.style import LONGEST, plain


@dataclass(frozen=True, eq=False)
class Plane:
    """One or two directions in the space of the features.

    Attributes
    ----------
    centre : ndarray of shape (d,)
        The point that is drawn at 0.
    directions : ndarray of shape (d, m)
        m is 1 or 2.
    labels : tuple of str
        What the axes are called.
    """

    centre: Floats
    directions: Floats
    labels: tuple[str, ...]

    @property
    def flat(self) -> bool:
        """Whether there is one direction alone."""
        return len(self.labels) == 1

    def points(self, rows: Floats) -> Floats:
        """Return where rows (n, d) are, (n, m)."""
        points: Floats = (rows - self.centre) @ self.directions
        return points

    def covariance(self, parameters: MixtureParameters, component: int) -> Floats:
        """Return a component's covariance along the directions, (m, m)."""
        drawn = parameters.structure.draw(np.eye(len(self.centre)), parameters.covariances, component)
        along = drawn @ self.directions  # draws are linear: of the unit vectors they are a factor's rows
        covariance: Floats = along.T @ along
        return covariance


def plane_of(estimator: GaussianMixture, drawn: DrawnRows, features: Any) -> Plane:
    """Return the plane of the features that are named; of None, of all of them or of the principal axes.

    Parameters
    ----------
    estimator : GaussianMixture
        Fitted.
    drawn : DrawnRows
        Whose principal axes are taken where more than two features are to be drawn.
    features : None, int, str, or a sequence of one or two of these

    Raises
    ------
    InvalidDataError
        There is no such feature, or more than two are named.
    """
    d = int(estimator.n_features_in_)
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    if features is None and d > 2:
        return _principal_plane(drawn)
    numbers = list(range(d)) if features is None else _numbers(features, names, d)
    labels = tuple(plain(names[i], LONGEST) if names else f"feature {i}" for i in numbers)
    return Plane(np.zeros(d), np.eye(d)[:, numbers], labels)


def _numbers(features: Any, names: Sequence[str], d: int) -> list[int]:
    given = [features] if isinstance(features, str) or not isinstance(features, Iterable) else [*features]
    if not 1 <= len(given) <= 2 or len(set(given)) < len(given):
        raise InvalidDataError(
            f"features = {short(features)} must be one feature or two different ones; None draws the two "
            "principal axes of the data."
        )
    return [_number(feature, names, d) for feature in given]


def _number(feature: Any, names: Sequence[str], d: int) -> int:
    if isinstance(feature, str) and feature in names:
        return names.index(feature)
    if integer(0, d - 1).holds(feature):
        return int(feature)
    known = f", or a name: {short(list(names))}" if names else ""
    raise InvalidDataError(
        f"features: there is no feature {short(feature)}. Give a number from 0 to {d - 1}{known}."
    )


def _principal_plane(drawn: DrawnRows) -> Plane:
    """Return the plane of the two directions in which weighted rows vary most."""
    share = drawn.weights / drawn.weights.sum()
    centre = share @ drawn.rows
    centred = (drawn.rows - centre) * np.sqrt(share)[:, np.newaxis]
    total = float(np.einsum("ij,ij->", centred, centred))
    directions = _largest(centred)
    variances: Floats = ((centred @ directions) ** 2).sum(axis=0)
    parts = variances / total if total > 0 else np.zeros(2)
    labels = tuple(f"principal axis {i + 1} ({part:.0%} of the variance)" for i, part in enumerate(parts))
    return Plane(centre, directions, labels)


def _largest(centred: Floats) -> Floats:
    """Return the first two right-singular vectors (d, 2), each with a positive largest entry."""
    m, d = centred.shape
    wide = d > m
    products = centred @ centred.T if wide else centred.T @ centred
    last = [len(products) - 2, len(products) - 1]
    vectors = eigh(products, subset_by_index=last)[1] if len(products) > 1 else np.ones((1, 1))
    directions = np.zeros((d, 2))
    found = (centred.T @ vectors if wide else vectors)[:, ::-1]
    directions[:, : found.shape[1]] = found
    lengths = np.linalg.norm(directions, axis=0)
    for i in np.flatnonzero(lengths <= 1e-6 * lengths.max()):  # of fewer than three different rows
        directions[:, i] = 0.0
        directions[:, i] = _across(directions[:, 1 - i])
    directions /= np.linalg.norm(directions, axis=0)
    largest = directions[np.abs(directions).argmax(axis=0), [0, 1]]
    signed: Floats = directions * np.where(largest < 0, -1.0, 1.0)
    return signed


def _across(direction: Floats) -> Floats:
    """Return a unit vector at a right angle to a direction, which may be zero."""
    across: Floats = np.eye(len(direction))[np.abs(direction).argmin()]
    if direction.any():
        unit = direction / np.linalg.norm(direction)
        across = across - (across @ unit) * unit
    return across / np.linalg.norm(across)
