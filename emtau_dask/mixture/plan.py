"""Which arithmetic scores the rows under one Θ, and in blocks of how many.

Two forms lead to the same numbers. *Features* (`mixture.features`) score all components by one matrix
product, and sum all moments by another. They lose digits on components that are nearly singular, or many of
their standard deviations from the origin of the features, and they need much arithmetic in many dimensions.
The *centred* form works per component on the differences to its mean and requires nothing of the data. All
components have the same form. Which one is a fixed function of Θ, never of a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Frame
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.cutoff import Reach, may_leave_out, reach_where_few
from emtau_dask.mixture.features import (
    about_mean,
    coefficients,
    conditions,
    frames_of,
    statistics_of_moments,
)
from emtau_dask.mixture.linalg import EPS, FEW_FEATURES, Floats, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import RowSums, SufficientStatistics, merge, tile_rows, views_of

DOUBLE = np.dtype(np.float64)
SINGLE_EPS = float(np.finfo(np.float32).eps)
LIMIT = 1e-12
"""Largest error that products may bring into a log-density, in nats; about ε times `conditions`."""
SINGLE_LIMIT = 1e-5
"""The same for products in float32, of rows that are stored so."""
STATISTICS_SLACK = 4.0
"""Largest tolerated error of a component's new variances, relative to them, in units of the limits above."""
WIDEST, WIDEST_ALONE, WIDTH_PER_COMPONENT = 96, 10, 2
"""Most features d for which components with factors of their own use quadratic features: 10 + 2 K, but 96 at
most (`benchmarks/kernels.py`). All components share the cost of forming them."""
BLOCK_BYTES, LONG_BLOCK_BYTES = 2**23, 2**24
"""Of a block and its buffers. The second is for fewer than `FEW_FEATURES`, of which calls of NumPy are
short."""
WIDEST_IN_TILES, MOST_IN_TILES = 19, 383
"""The same for compiled tiles, which in the centred form are faster beyond (`benchmarks/compiled.py`); and
the most features of components with factors of their own that go by tiles. With more, BLAS is faster."""
SPARE_DIGITS = 4.0
"""Compiled tiles score components with factors of their own by features only as long as rounding may grow so
many times before it reaches the limit: in the centred form they cost little more, and a pass that lost digits
is done again."""
GROUP_BYTES, LEAST_GROUP_ROWS, MOST_GROUP_ROWS = 2**22, 8, 64
"""Of the rows that compiled tiles gather for components in the centred form."""
SIDE_PADDING, WIDEST_PADDING = 7, 23
"""Most numbers beyond a row's features in the scatters of tiles, and in the rows that are gathered."""
MIN_BLOCK_ROWS, MIN_CENTRED_ROWS, MAX_BLOCK_ROWS = 64, 1024, 2**15
"""In the centred form, K matrices (d, d) are read for each block, which should be long beside that."""
HELD_NUMBERS, MAX_HELD_ROWS = 2**20, 2**16
"""Of rows and their responsibilities that are summed at a time in the centred form."""
MERGED_ROWS = 8192
"""Rows whose moments about means compiled tiles merge block by block; their sums are merged pairwise."""
NEAR_BYTES, MOST_NEAR_ROWS = 2**24, 2**17
"""Of the rows of a block whose rows are scored near components: the longer, the more rows each has."""
NEAR_TILE_BYTES = 800
"""What tiles of such rows take for each component, beside its coefficients."""
MOST_SHRUNK = 2.0**-20
"""The least that may be left of a component's weight after a pass without those that do not count."""


def fits_tiles(structure: CovarianceStructure, n_features: int) -> bool:
    """Return whether compiled tiles are for rows of so many features."""
    return not structure.own_factors or n_features <= MOST_IN_TILES


def _by_features(structure: CovarianceStructure, n_components: int, n_features: int) -> bool:
    """Return whether well-conditioned components of a shape are scored by features."""
    widest = min(WIDEST, WIDEST_ALONE + WIDTH_PER_COMPONENT * n_components)
    return not structure.own_factors or n_features <= widest


def row_bytes(covariance_type: str, n_components: int, n_features: int, *, features: bool) -> int:
    """Return the bytes that a row of a block takes in a kernel's buffers and temporary arrays."""
    count = structure_named(covariance_type).n_row_features(n_features) if features else 0
    return 8 * (count + 4 * n_features + 4 * n_components)


def block_rows(covariance_type: str, n_components: int, n_features: int, *, features: bool) -> int:
    """Return how many rows make a block, by features or centred: a fixed function of its arguments.

    A block with its buffers takes about 8 or 16 MiB and has at most 32,768 rows. A smaller one would gain in
    the L2 cache, but lose more: the longer the calls of NumPy, the less threads wait for each other between
    them.
    """
    least = MIN_BLOCK_ROWS if features else MIN_CENTRED_ROWS
    wanted = LONG_BLOCK_BYTES if n_features < FEW_FEATURES else BLOCK_BYTES
    rows = wanted // row_bytes(covariance_type, n_components, n_features, features=features)
    return max(least, min(MAX_BLOCK_ROWS, rows // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS))


def held_rows(structure: CovarianceStructure, n_components: int, n_features: int) -> int:
    """Return how many rows are held in the centred form until they are summed: a fixed function of shapes.

    They take 8 MiB or more, or half as much memory as their statistics, and are at most 65,536: to merge K
    matrices (d, d) costs more than to sum few rows.
    """
    numbers = math.prod(structure.shape(n_components, n_features)) // 2
    return min(MAX_HELD_ROWS, max(HELD_NUMBERS, numbers) // (n_features + n_components))


def even_length(n_rows: int, wanted: int) -> int:
    """Return the equal length of the blocks of ``n_rows`` rows: about ``wanted`` or less, a multiple of 64.

    A chunk of up to 1.5 times ``wanted`` is one block, since a short block costs nearly as many calls as a
    long one.
    """
    blocks = 1 if 2 * n_rows <= 3 * wanted else -(-n_rows // wanted)
    return max(1, -(-n_rows // (blocks * MIN_BLOCK_ROWS))) * MIN_BLOCK_ROWS


def group_rows(n_components: int, n_features: int) -> int:
    """Return how many rows compiled tiles gather for each component: a fixed function of its arguments."""
    fitting = GROUP_BYTES // (8 * max(1, n_components) * n_features)
    return max(LEAST_GROUP_ROWS, min(MOST_GROUP_ROWS, fitting))


def _gathered_bytes(n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of what compiled tiles take in the centred form beside their rows."""
    at_a_time = 3 + (n_rows // MERGED_ROWS).bit_length()
    groups = n_components * (1 + group_rows(n_components, n_features)) * (n_features + WIDEST_PADDING)
    moments = n_components * (1 + n_features + (n_features + SIDE_PADDING) ** 2)
    return 8 * (groups + at_a_time * moments + 3 * n_components * n_features**2)


def longest_block(n_rows: int, wanted: int) -> int:
    """Return an upper bound of `even_length` for chunks of up to ``n_rows`` rows."""
    return min(n_rows, 3 * wanted // 2) + MIN_BLOCK_ROWS


def near_rows(n_features: int) -> int:
    """Return about how many rows make a block that is scored near components."""
    return min(MOST_NEAR_ROWS, NEAR_BYTES // (8 * n_features))


def _near_bytes(n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the bytes that such blocks take beside what they are summed in."""
    if not may_leave_out(n_components, n_features, n_rows):
        return 0
    of_rows = longest_block(n_rows, near_rows(n_features)) * (8 * n_features + 32)
    return of_rows + n_components * (8 * (n_features + 1) ** 2 + 4 * n_components + NEAR_TILE_BYTES)


def block_bytes(covariance_type: str, n_components: int, n_features: int, n_rows: int) -> int:
    """Return an upper bound of the bytes that a kernel takes for chunks of ``n_rows`` rows."""
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
    held = min(n_rows, held_rows(structure, n_components, n_features) + longest)
    summed = (
        held * 8 * (3 * n_features + 2 * n_components) + min(n_rows, tile_rows(n_features)) * 8 * n_features
    )
    return in_blocks + summed + in_tiles


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """How the rows are scored under one Θ.

    Attributes
    ----------
    parameters : MixtureParameters
    frame : Frame or None
        Where the coordinates of features are formed; None if components are scored in the centred form.
    single : bool
        Whether products with features are in float32.
    reach : Reach or None
        By which compiled tiles leave out components that do not count for a row, in the centred form; None
        where they score all.
    """

    parameters: MixtureParameters
    frame: Frame | None = None
    single: bool = False
    reach: Reach | None = None

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows that compiled tiles take."""
        return np.dtype(np.float32 if self.single else np.float64)

    @property
    def block_rows(self) -> int:
        """About how many rows a block has that NumPy scores."""
        parameters = self.parameters
        shape = parameters.covariance_type, parameters.n_components, parameters.n_features
        return block_rows(*shape, features=self.frame is not None)

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the weighted log-density of any row, nats; it is subtracted from scores."""
        return float(self.parameters.log_scales.max())

    @cached_property
    def log_scales(self) -> Floats:
        """Those of the parameters, less the ceiling, shape (K,), nats."""
        return self.parameters.log_scales - self.ceiling

    @cached_property
    def coefficients(self) -> Floats:
        """The coefficients of the F features in the scores of the components, (K, F)."""
        assert self.frame is not None
        found = coefficients(self.parameters, self.frame)
        found[:, 0] -= self.ceiling
        return found

    @cached_property
    def moment_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the moments of features."""
        structure, (n_components, n_features) = self.parameters.structure, self.parameters.means.shape
        return structure.moment_shapes(n_components, structure.n_row_features(n_features))

    def statistics(self, sums: RowSums) -> SufficientStatistics:
        """Return the statistics of rows that were summed under this plan."""
        if sums.moments is None:
            assert sums.statistics is not None
            return sums.statistics
        assert self.frame is not None
        structure, moments = self.parameters.structure, views_of(sums.moments, self.moment_shapes)
        found = statistics_of_moments(structure, self.frame, moments)
        return found if sums.statistics is None else merge(structure, found, sums.statistics)

    @property
    def exact(self) -> bool:
        """Whether every component is scored for every row, in the centred form."""
        return self.reach is None and self.frame is None

    @cached_property
    def centred(self) -> KernelPlan:
        """The plan that scores every component in the centred form."""
        return KernelPlan(self.parameters)

    def kept_digits(self, produced: MixtureParameters) -> bool:
        """Return whether the statistics behind ``produced`` kept their digits; else the rows go centred.

        They may not where a component collapsed during the iteration: beside its distance from the frame's
        origin it is tiny, and products lose its digits. Where it lost nearly all of its weight, rows for
        which it did not count may be most of what it has left.
        """
        if self.reach is not None:
            return bool((produced.weights >= MOST_SHRUNK * self.parameters.weights).all())
        if self.frame is None:
            return True
        epsilon, limit = (SINGLE_EPS, SINGLE_LIMIT) if self.single else (EPS, LIMIT)
        return bool((epsilon * conditions(produced, self.frame) <= STATISTICS_SLACK * limit).all())


def plan_kernel(parameters: MixtureParameters) -> KernelPlan:
    """Return how NumPy scores rows under ``parameters``."""
    if not _by_features(parameters.structure, *parameters.means.shape):
        return KernelPlan(parameters)
    return _precise(parameters, LIMIT)


def plan_tiles(
    parameters: MixtureParameters, dtype: np.dtype[Any] = DOUBLE, chunk_rows: float = 0
) -> KernelPlan:
    """Return how compiled tiles score rows of ``dtype`` under ``parameters``: as `plan_kernel`, mostly.

    Products are in float32 where rows are, and where the condition holds without whitening, which could lose
    digits itself. Components with factors of their own are scored in the centred form from 20 features on.
    With many components or features, those that do not count for a row are left out if few reach far;
    ``chunk_rows`` is about how many rows of a chunk are scored.
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
    if structure.own_factors and may_leave_out(K, d, chunk_rows):
        reach = reach_where_few(parameters, about_mean(parameters).centre)
        if reach is not None:
            return KernelPlan(parameters, reach=reach)
    if not by_features or (structure.own_factors and d > WIDEST_IN_TILES):
        return KernelPlan(parameters)
    return _precise(parameters, LIMIT / SPARE_DIGITS if structure.own_factors else LIMIT)


def _precise(parameters: MixtureParameters, limit: float) -> KernelPlan:
    """Return the plan by features in the first frame in which they are off by ``limit`` nats at most.

    Where there is none, it is that of the centred form.
    """
    for frame in frames_of(parameters):
        if (EPS * conditions(parameters, frame) <= limit).all():
            return KernelPlan(parameters, frame)
    return KernelPlan(parameters)
