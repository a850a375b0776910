"""The plan of the E-step under one Θ: the form of the arithmetic, and the length of blocks.

Two forms give the same results. *Features* (`mixture.features`) score all components by one matrix product,
and sum all moments by another. They lose digits if a component is nearly singular, or many of its standard
deviations from the origin of the features, and they need much arithmetic in many dimensions. The *centred*
form processes each component with the differences to its mean and requires nothing of the data. All
components have the same form. The choice is a fixed function of Θ, never of a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Frame
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.cutoff import Cutoffs, cutoffs_if_few, skipping_may_pay
from emtau_dask.mixture.features import (
    about_mean,
    coefficients,
    conditions,
    frames_of,
    incomplete_coefficients,
    statistics_of_incomplete,
    statistics_of_moments,
)
from emtau_dask.mixture.linalg import EPS, FEW_FEATURES, Floats, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import RowSums, SufficientStatistics, merge, tile_rows, views_of

DOUBLE = np.dtype(np.float64)
SINGLE_EPS = float(np.finfo(np.float32).eps)
LIMIT = 1e-12
"""Maximum error of a log-density by products (nats); it is about ε times `conditions`."""
SINGLE_LIMIT = 1e-5
"""The same for products in float32, of rows that are stored in float32."""
MAX_PRECISION_BYTES = 2**23
"""Maximum size of the precisions with which compiled tiles score rows with missing values (bytes)."""
MISSING_LIMIT = 1e-10
"""Maximum error of expected values by compiled tiles (standard deviations), about ε times `conditions`."""
STATISTICS_SLACK = 4.0
"""Maximum relative error of a component's new variances, in units of the limits above."""
MAX_FEATURES, MAX_FEATURES_OF_ONE, FEATURES_PER_COMPONENT = 96, 10, 2
"""Maximum number of features d for which components with their own factors use quadratic features: 10 + 2 K,
and at most 96 (`benchmarks/kernels.py`). All components share the cost of forming them."""
BLOCK_BYTES, LONG_BLOCK_BYTES = 2**23, 2**24
"""Size of a block with its buffers (bytes). The second is for fewer than `FEW_FEATURES` features, where calls
of NumPy are short."""
MAX_FEATURES_IN_TILES, MAX_TILED_FEATURES = 19, 383
"""Maximum features for which compiled tiles use quadratic features; with more, their centred form is faster
(`benchmarks/compiled.py`). And maximum features for which components with their own factors use tiles at all;
with more, BLAS is faster."""
SPARE_DIGITS = 4.0
"""Minimum ratio of the limit to the rounding errors for which compiled tiles use features for components with
their own factors. The centred form of tiles costs little more, and a pass that lost digits is repeated."""
GROUP_BYTES, MIN_GROUP_ROWS, MAX_GROUP_ROWS = 2**22, 8, 64
"""Maximum size of the rows that compiled tiles gather for components in the centred form (bytes), and limits
of their number for each component."""
MAX_SIDE_PADDING, MAX_ROW_PADDING = 7, 23
"""Maximum padding of the d features in the scatters of tiles, and in gathered rows (values)."""
MIN_BLOCK_ROWS, MIN_CENTRED_ROWS, MAX_BLOCK_ROWS = 64, 1024, 2**15
"""Limits of the rows of a block. In the centred form it is longer, because each block reads K matrices (d,
d)."""
PENDING_VALUES, MAX_PENDING_ROWS = 2**20, 2**16
"""Minimum values, and maximum rows, whose responsibilities are collected before they are summed in the
centred form."""
MERGED_ROWS = 8192
"""Number of rows whose moments about means compiled tiles merge block by block; these sums are merged
pairwise."""
NEAR_BYTES, MAX_NEAR_ROWS = 2**24, 2**17
"""Maximum size (bytes) and rows of a block whose rows are scored near components. The longer the block, the
more rows each component has."""
NEAR_TILE_BYTES = 800
"""Memory of tiles of such rows for each component, without its coefficients (bytes)."""
MIN_WEIGHT_RATIO = 2.0**-20
"""Minimum ratio of a component's weight after a pass with cut-offs to that before."""


def fits_tiles(structure: CovarianceStructure, n_features: int) -> bool:
    """Return whether compiled tiles support this number of features."""
    return not structure.own_factors or n_features <= MAX_TILED_FEATURES


def _by_features(structure: CovarianceStructure, n_components: int, n_features: int) -> bool:
    """Return whether well-conditioned components of this shape are scored by features."""
    widest = min(MAX_FEATURES, MAX_FEATURES_OF_ONE + FEATURES_PER_COMPONENT * n_components)
    return not structure.own_factors or n_features <= widest


def row_bytes(covariance_type: str, n_components: int, n_features: int, *, features: bool) -> int:
    """Return the memory of a row of a block in a kernel's buffers and temporary arrays (bytes)."""
    count = structure_named(covariance_type).n_row_features(n_features) if features else 0
    return 8 * (count + 4 * n_features + 4 * n_components)


def block_rows(covariance_type: str, n_components: int, n_features: int, *, features: bool) -> int:
    """Return the number of rows of a block, by features or centred: a fixed function of its arguments.

    A block with its buffers takes about 8 or 16 MiB and has at most 32,768 rows. A smaller block would use
    the L2 cache better, but lose more: with longer calls of NumPy, threads wait less for each other.
    """
    least = MIN_BLOCK_ROWS if features else MIN_CENTRED_ROWS
    wanted = LONG_BLOCK_BYTES if n_features < FEW_FEATURES else BLOCK_BYTES
    rows = wanted // row_bytes(covariance_type, n_components, n_features, features=features)
    return max(least, min(MAX_BLOCK_ROWS, rows // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS))


def pending_rows(structure: CovarianceStructure, n_components: int, n_features: int) -> int:
    """Return how many rows the centred form collects before they are summed: a fixed function of shapes.

    They take at least 8 MiB, or half of the memory of their statistics, and are at most 65,536 rows. Merging
    K matrices (d, d) costs more than summing few rows.
    """
    values = math.prod(structure.shape(n_components, n_features)) // 2
    return min(MAX_PENDING_ROWS, max(PENDING_VALUES, values) // (n_features + n_components))


def even_length(n_rows: int, wanted: int) -> int:
    """Return the length of equal blocks of ``n_rows`` rows: about ``wanted`` or less, a multiple of 64.

    A chunk of up to 1.5 times ``wanted`` is one block, because a short block costs nearly as many calls as a
    long one.
    """
    blocks = 1 if 2 * n_rows <= 3 * wanted else -(-n_rows // wanted)
    return max(1, -(-n_rows // (blocks * MIN_BLOCK_ROWS))) * MIN_BLOCK_ROWS


def group_rows(n_components: int, n_features: int) -> int:
    """Return the number of rows that compiled tiles gather for each component: a function of the shape."""
    fitting = GROUP_BYTES // (8 * max(1, n_components) * n_features)
    return max(MIN_GROUP_ROWS, min(MAX_GROUP_ROWS, fitting))


def _gathered_bytes(n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the memory of centred compiled tiles, without their rows (bytes)."""
    at_a_time = 3 + (n_rows // MERGED_ROWS).bit_length()
    groups = n_components * (1 + group_rows(n_components, n_features)) * (n_features + MAX_ROW_PADDING)
    moments = n_components * (1 + n_features + (n_features + MAX_SIDE_PADDING) ** 2)
    return 8 * (groups + at_a_time * moments + 3 * n_components * n_features**2)


def longest_block(n_rows: int, wanted: int) -> int:
    """Return an upper bound of `even_length` for chunks of up to ``n_rows`` rows."""
    return min(n_rows, 3 * wanted // 2) + MIN_BLOCK_ROWS


def near_rows(n_features: int) -> int:
    """Return the approximate number of rows of a block that is scored near components."""
    return min(MAX_NEAR_ROWS, NEAR_BYTES // (8 * n_features))


def _near_bytes(n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the memory of such blocks, without their sums (bytes)."""
    if not skipping_may_pay(n_components, n_features, n_rows):
        return 0
    of_rows = longest_block(n_rows, near_rows(n_features)) * (8 * n_features + 32)
    return of_rows + n_components * (8 * (n_features + 1) ** 2 + 4 * n_components + NEAR_TILE_BYTES)


def block_bytes(covariance_type: str, n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the memory of a kernel for chunks of ``n_rows`` rows (bytes)."""
    shape = covariance_type, n_components, n_features
    structure = structure_named(covariance_type)
    in_blocks = max(
        longest_block(n_rows, block_rows(*shape, features=features)) * row_bytes(*shape, features=features)
        for features in {_by_features(structure, n_components, n_features), False}
    )
    in_tiles = 0
    if structure.own_factors and fits_tiles(structure, n_features):
        in_tiles = _gathered_bytes(n_components, n_features, n_rows)
        in_tiles += _near_bytes(n_components, n_features, n_rows)
    longest = longest_block(n_rows, block_rows(*shape, features=False))
    pending = min(n_rows, pending_rows(structure, n_components, n_features) + longest)
    residuals = min(n_rows, tile_rows(n_features)) * 8 * n_features
    return in_blocks + pending * 8 * (3 * n_features + 2 * n_components) + residuals + in_tiles


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """How the rows are scored under one Θ.

    Attributes
    ----------
    parameters : MixtureParameters
    frame : Frame or None
        The coordinates in which features are formed; None if components are scored in the centred form.
    single : bool
        Whether products with features are in float32.
    cutoffs : Cutoffs or None
        Cut-offs by which compiled tiles skip components that do not count for a row, in the centred form;
        None if they score all.
    incomplete : bool
        Whether compiled tiles score rows with missing values: by features if those of a component are
        independent, otherwise in the centred form, in which all components have their own factors.
    """

    parameters: MixtureParameters
    frame: Frame | None = None
    single: bool = False
    cutoffs: Cutoffs | None = None
    incomplete: bool = False

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of rows for compiled tiles."""
        return np.dtype(np.float32 if self.single else np.float64)

    @property
    def block_rows(self) -> int:
        """Approximate number of rows of a block that NumPy scores."""
        parameters = self.parameters
        shape = parameters.covariance_type, parameters.n_components, parameters.n_features
        return block_rows(*shape, features=self.frame is not None)

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the weighted log-density of any row, nats; it is subtracted from scores.

        That of a row may be larger by the volume of what it lacks.
        """
        bound, parameters = float(self.parameters.log_scales.max()), self.parameters
        if not self.incomplete:
            return bound
        variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
        return bound + float(np.maximum(0.0, 0.5 * np.log(2.0 * np.pi * variances.max(axis=0))).sum())

    @cached_property
    def log_scales(self) -> Floats:
        """The log-scales of the parameters minus the ceiling, (K,), nats."""
        return self.parameters.log_scales - self.ceiling

    @cached_property
    def coefficients(self) -> Floats:
        """The coefficients of the F features in the scores of the components, (K, F)."""
        assert self.frame is not None
        of_features = incomplete_coefficients if self.incomplete else coefficients
        shifted = of_features(self.parameters, self.frame)
        shifted[:, 0] -= self.ceiling
        return shifted

    @cached_property
    def moment_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the moments of features."""
        structure, (n_components, n_features) = self.parameters.structure, self.parameters.means.shape
        if self.incomplete:
            return ((n_components, 1 + 3 * n_features),)
        return structure.moment_shapes(n_components, structure.n_row_features(n_features))

    def statistics(self, sums: RowSums) -> SufficientStatistics:
        """Return the statistics of rows that were summed under this plan."""
        if sums.moments is None:
            assert sums.statistics is not None
            return sums.statistics
        assert self.frame is not None
        structure, moments = self.parameters.structure, views_of(sums.moments, self.moment_shapes)
        if self.incomplete:
            statistics = statistics_of_incomplete(self.parameters, self.frame, *moments)
        else:
            statistics = statistics_of_moments(structure, self.frame, moments)
        return statistics if sums.statistics is None else merge(structure, statistics, sums.statistics)

    @property
    def exact(self) -> bool:
        """Whether every component is scored for every row, in the centred form."""
        return self.cutoffs is None and self.frame is None

    @cached_property
    def centred(self) -> KernelPlan:
        """The plan that scores every component in the centred form."""
        return KernelPlan(self.parameters)

    def kept_digits(self, produced: MixtureParameters) -> bool:
        """Return whether the statistics behind ``produced`` kept their digits; else use the centred form.

        They lose digits in products if a component collapsed during the iteration, so that it is tiny
        compared with its distance from the frame's origin. With cut-offs they are wrong if it lost nearly all
        of its weight: skipped rows may be most of what it has left.
        """
        if self.cutoffs is not None:
            return bool((produced.weights >= MIN_WEIGHT_RATIO * self.parameters.weights).all())
        if self.frame is None:
            return True
        epsilon, limit = (SINGLE_EPS, SINGLE_LIMIT) if self.single else (EPS, LIMIT)
        return bool((epsilon * conditions(produced, self.frame) <= STATISTICS_SLACK * limit).all())


def plan_kernel(parameters: MixtureParameters) -> KernelPlan:
    """Return the plan by which NumPy scores rows under ``parameters``."""
    if not _by_features(parameters.structure, *parameters.means.shape):
        return KernelPlan(parameters)
    return _precise(parameters, LIMIT)


def plan_tiles(
    parameters: MixtureParameters, dtype: np.dtype[Any] = DOUBLE, chunk_rows: float = 0
) -> KernelPlan:
    """Return the plan by which compiled tiles score rows of ``dtype`` under ``parameters``.

    It is mostly that of `plan_kernel`. Products are in float32 if the rows are, and if the condition holds
    without whitening, which could lose digits itself. Components with their own factors are scored in the
    centred form from 20 features on. With many components or features, those that do not count for a row are
    skipped if there are enough of them. ``chunk_rows`` is the approximate number of scored rows of a chunk.
    """
    structure, (K, d) = parameters.structure, parameters.means.shape
    if not fits_tiles(structure, d):
        return KernelPlan(parameters)
    by_features = _by_features(structure, K, d)
    if by_features and dtype == np.float32:
        mean = about_mean(parameters)
        if (SINGLE_EPS * conditions(parameters, mean) <= SINGLE_LIMIT).all():
            first = next(frames_of(parameters))
            rounded = Frame(read_only_copy(first.centre.astype(np.float32)), first.transform)
            return KernelPlan(parameters, rounded, single=True)
    if structure.own_factors and skipping_may_pay(K, d, chunk_rows):
        cutoffs = cutoffs_if_few(parameters, about_mean(parameters).centre)
        if cutoffs is not None:
            return KernelPlan(parameters, cutoffs=cutoffs)
    if not by_features or (structure.own_factors and d > MAX_FEATURES_IN_TILES):
        return KernelPlan(parameters)
    return _precise(parameters, LIMIT / SPARE_DIGITS if structure.own_factors else LIMIT)


def plan_incomplete(parameters: MixtureParameters) -> KernelPlan:
    """Return the plan by which compiled tiles score rows with missing values.

    It is that of NumPy if digits would be lost, or if the precisions of all components are too large for a
    tile.
    """
    K, d = parameters.means.shape
    if parameters.structure.independent:
        plan = plan_kernel(parameters)
        return replace(plan, incomplete=plan.frame is not None)
    if d > MAX_TILED_FEATURES or 8 * K * d**2 > MAX_PRECISION_BYTES:
        return plan_kernel(parameters)
    errors = EPS * conditions(parameters, about_mean(parameters))
    return (
        KernelPlan(parameters, incomplete=True)
        if (errors <= MISSING_LIMIT).all()
        else plan_kernel(parameters)
    )


def _precise(parameters: MixtureParameters, limit: float) -> KernelPlan:
    """Return the plan by features in the first frame with errors of at most ``limit`` nats.

    If there is no such frame, return the plan of the centred form.
    """
    for frame in frames_of(parameters):
        if (EPS * conditions(parameters, frame) <= limit).all():
            return KernelPlan(parameters, frame)
    return KernelPlan(parameters)
