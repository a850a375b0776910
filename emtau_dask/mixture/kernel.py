"""The E-step over blocks of rows, and the statistics that it leaves: which arithmetic, and the arithmetic.

Two ways lead to the same numbers. *Features* (`mixture.features`) turn a whole
block into two matrix products, at the price of digits on components that are far
from the origin of the features, in their own standard deviations, or nearly
singular. The *centred* form (`mixture.centred`) works per component on the
differences to its mean and asks nothing of the data. `KernelPlan` says which
component goes which way: a fixed function of Θ, never of a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from emtau_dask.mixture.arrays import EPS, Bools, Floats
from emtau_dask.mixture.centred import (
    CentredStatistics,
    CentredWorkspace,
    centred_log_densities,
    stretch_rows,
)
from emtau_dask.mixture.features import FORMS, Frame, MomentSums, conditions, frames_of
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics, merge, tile_rows

__all__ = ["BlockKernel", "KernelPlan", "block_bytes", "block_rows", "plan_kernel"]

DOUBLE = np.dtype(np.float64)
SINGLE_EPS = float(np.finfo(np.float32).eps)
LIMIT = 1e-12
"""Largest error that features may bring into a log-density, in nats; about ε times `conditions`."""
SINGLE_LIMIT = 1e-5
"""The same for products in float32, of rows that are stored so."""
STATISTICS_SLACK = 4.0
"""How much more the error of a component's new variances may be, relative to them."""
WIDEST, WIDEST_ALONE, WIDTH_PER_COMPONENT = 96, 10, 3
"""Features d up to which full covariances use quadratic features, a cost that all components
share: 10 + 3 K, and 96 at most, beyond which 64 rows of them outgrow the cache
(`benchmarks/kernels.py`)."""
FEATURE_BLOCK_BYTES, CENTRED_BLOCK_BYTES = 2**20, 2**21
MIN_BLOCK_ROWS, MIN_CENTRED_ROWS, MAX_BLOCK_ROWS = 64, 512, 8192
"""Centred, a block meets K matrices (d, d): they are read for it, and it should be long beside that."""


def uses_features(covariance_type: str, n_components: int, n_features: int) -> bool:
    """Return whether well-conditioned components of this shape go by features."""
    widest = min(WIDEST, WIDEST_ALONE + WIDTH_PER_COMPONENT * n_components)
    return covariance_type != "full" or n_features <= widest


def row_bytes(covariance_type: str, n_components: int, n_features: int, by_features: bool) -> int:
    """Return the bytes that a row of a block takes in a kernel's buffers and temporary arrays."""
    features = FORMS[covariance_type].count(n_features) if by_features else 0
    return 8 * (features + 4 * n_features + 4 * n_components)


def block_rows(covariance_type: str, n_components: int, n_features: int, by_features: bool) -> int:
    """Return how many rows make a block: a fixed function of its arguments.

    What a block of features needs takes about 1 MiB, half the L2 cache of a
    core. Centred, with several calls for each component, it is 2 MiB: the
    longer the calls, the less threads wait for each other between them.
    `MIN_CENTRED_ROWS` are the least then.
    """
    wanted, least = (
        (FEATURE_BLOCK_BYTES, MIN_BLOCK_ROWS) if by_features else (CENTRED_BLOCK_BYTES, MIN_CENTRED_ROWS)
    )
    rows = wanted // row_bytes(covariance_type, n_components, n_features, by_features)
    return max(least, min(MAX_BLOCK_ROWS, rows // 64 * 64))


def block_bytes(covariance_type: str, n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the bytes that a kernel takes for chunks of ``n_rows`` rows."""
    shape = covariance_type, n_components, n_features
    in_blocks = max(
        min(n_rows, block_rows(*shape, by_features)) * row_bytes(*shape, by_features)
        for by_features in {False, uses_features(*shape)}
    )
    stretch = stretch_rows(n_components, n_features, block_rows(*shape, by_features=False))
    gathered = min(n_rows, stretch) * 8 * (n_components + 2 * n_features)
    return in_blocks + gathered + min(n_rows, tile_rows(n_features)) * 8 * n_features


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """How the rows are scored under one Θ.

    Attributes
    ----------
    parameters : MixtureParameters
    frame : Frame
        Where features are formed.
    by_features : ndarray of bool, shape (K,)
        The components that go by features; the others go centred.
    single : bool
        Whether products are in float32, and all components go by features.
    """

    parameters: MixtureParameters
    frame: Frame
    by_features: Bools
    single: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of rows, features and responsibilities."""
        return np.dtype(np.float32 if self.single else np.float64)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        parameters = self.parameters
        shape = parameters.covariance_type, parameters.n_components, parameters.n_features
        return block_rows(*shape, bool(self.by_features.any()))

    @cached_property
    def coefficients(self) -> Floats:
        """Of all features in all log-densities, (K, F)."""
        coefficients = FORMS[self.parameters.covariance_type].coefficients(self.parameters, self.frame)
        return coefficients.astype(self.dtype, copy=False)

    @cached_property
    def centred(self) -> KernelPlan:
        """The plan by which every component goes centred."""
        return KernelPlan(self.parameters, self.frame, np.zeros_like(self.by_features))

    def admits(self, produced: MixtureParameters) -> bool:
        """Return whether the statistics behind ``produced`` kept their digits.

        A component that collapses during an iteration is tiny beside its
        distance from the frame's origin, and features have not seen it well.
        """
        if not self.by_features.any():
            return True
        grown = conditions(produced, self.frame)[self.by_features]
        epsilon, limit = (SINGLE_EPS, SINGLE_LIMIT) if self.single else (EPS, LIMIT)
        return bool((epsilon * grown <= STATISTICS_SLACK * limit).all())


def plan_kernel(parameters: MixtureParameters, dtype: np.dtype[Any] = DOUBLE) -> KernelPlan:
    """Return how to score rows of ``dtype`` under ``parameters``.

    Products are in float32 where rows are, and where the condition holds in the
    coordinates of the rows themselves, so that no whitening can lose digits either.
    """
    frames = frames_of(parameters)
    if not uses_features(parameters.covariance_type, parameters.n_components, parameters.n_features):
        return KernelPlan(parameters, next(frames), np.zeros(parameters.n_components, dtype=np.bool_))
    if dtype == np.float32:
        unwhitened = conditions(parameters, Frame(parameters.weights @ parameters.means, None))
        if (SINGLE_EPS * unwhitened <= SINGLE_LIMIT).all():
            return KernelPlan(
                parameters, next(frames), np.ones(parameters.n_components, dtype=np.bool_), True
            )
    plans = []
    for frame in frames:
        good = EPS * conditions(parameters, frame) <= LIMIT
        if parameters.covariance_type == "tied":
            good = np.full_like(good, good.all())
        plans.append(KernelPlan(parameters, frame, good))
        if good.all():
            break
    return max(plans, key=lambda plan: int(plan.by_features.sum()))


class BlockKernel:
    """Scores blocks of rows, and sums their statistics; its buffers serve one task.

    Parameters
    ----------
    plan : KernelPlan
    n_rows : int
        Rows of the largest block.

    Attributes
    ----------
    n_rows : int
    """

    def __init__(self, plan: KernelPlan, n_rows: int) -> None:
        parameters = plan.parameters
        K, d = parameters.n_components, parameters.n_features
        self.n_rows = n_rows
        self._plan = plan
        self._form = FORMS[parameters.covariance_type]
        self._log_scales = parameters.log_scales[:, np.newaxis]
        self._log_densities: Floats = np.empty((K, n_rows), dtype=plan.dtype)
        n_features = self._form.count(d) if plan.by_features.any() else 0
        self._features: Floats = np.ones((n_features, n_rows), dtype=plan.dtype)
        whitens = n_features > 0 and plan.frame.transform is not None
        self._scratch: Floats | None = np.empty((d, n_rows), dtype=plan.dtype) if whitens else None
        self._workspace: CentredWorkspace | None = None
        self._coefficients = plan.coefficients[plan.by_features] if n_features else np.empty((0, 0))
        self._moments = MomentSums(self._form, len(self._coefficients), d, plan.dtype)
        self._centred: CentredStatistics | None = None
        self._rows: Floats = np.empty((0, d))
        self._by_features = plan.by_features

    def score(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return responsibilities and log-likelihoods of a block of rows.

        Parameters
        ----------
        rows : ndarray of shape (n, d)
            Of the plan's dtype.

        Returns
        -------
        responsibilities : ndarray of shape (K, n)
            Of the plan's dtype, float64 for a block that features cannot score.
            Valid, and the caller's to change, until the next call. Paper,
            section 2, equation for ``w_k(x_n, Θ)``.
        log_likelihoods : ndarray of shape (n,), nats
            ``ln p(x_n | Θ)``; not finite where a row is beyond the range of float64.
        """
        self._rows = rows
        self._by_features = self._plan.by_features
        with np.errstate(over="ignore", invalid="ignore"):
            responsibilities, log_likelihoods = self._scored(rows)
            if self._by_features.any() and not np.isfinite(log_likelihoods).all():
                self._by_features = np.zeros_like(self._by_features)
                responsibilities, log_likelihoods = self._scored(rows)
        return responsibilities, log_likelihoods

    def _scored(self, rows: Floats) -> tuple[Floats, Floats]:
        by_features = self._by_features
        log_densities = self._log_densities[:, : len(rows)]
        if self._plan.single and not by_features.any():
            rows, log_densities = rows.astype(np.float64), np.empty(log_densities.shape)
        if by_features.any():
            self._fill_features(rows)
            features = self._features[:, : len(rows)]
            if by_features.all():
                np.matmul(self._coefficients, features, out=log_densities)
            else:
                log_densities[by_features] = self._coefficients @ features
        if not by_features.all():
            if self._workspace is None:
                self._workspace = CentredWorkspace(self.n_rows, rows.shape[1])
            centred_log_densities(
                rows,
                self._plan.parameters,
                self._log_scales,
                np.flatnonzero(~by_features),
                self._workspace,
                log_densities,
            )
        peaks = log_densities.max(axis=0)
        log_densities -= peaks
        np.exp(log_densities, out=log_densities)
        sums = log_densities.sum(axis=0)
        log_densities *= 1.0 / sums
        return log_densities, np.add(peaks, np.log(sums), dtype=np.float64)

    def _fill_features(self, rows: Floats) -> None:
        n, d = rows.shape
        scratch = None if self._scratch is None else self._scratch[:, :n]
        coordinates = self._features[1 : 1 + d, :n]
        self._plan.frame.place(rows, coordinates, scratch)
        self._form.fill(coordinates, self._features[1 + d :, :n])

    def collect(self, responsibilities: Floats) -> None:
        """Add the statistics of the block that was scored last.

        Parameters
        ----------
        responsibilities : ndarray of shape (K, n)
            Those of `score`, times the rows' weights.
        """
        by_features, rows = self._by_features, self._rows
        if by_features.any():
            everything = by_features.all()
            of_features = responsibilities if everything else responsibilities[by_features]
            self._moments.push(self._features[:, : len(rows)], of_features)
            if everything:
                return
            responsibilities = np.where(by_features[:, np.newaxis], 0.0, responsibilities)
        if self._centred is None:
            parameters = self._plan.parameters
            shape = parameters.n_components, parameters.n_features
            self._centred = CentredStatistics(parameters.structure, *shape, self.n_rows)
        self._centred.push(rows, responsibilities)

    def statistics(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks collected, None where there were none."""
        moments = self._moments.total()
        centred = None if self._centred is None else self._centred.total()
        if moments is None:
            return centred
        sums = np.zeros((len(self._log_densities), moments[0].shape[1]))
        sums[self._plan.by_features] = moments[0]
        moments = (sums, *moments[1:])
        found = self._form.statistics(moments, self._plan.frame)
        return found if centred is None else merge(self._plan.parameters.structure, found, centred)
