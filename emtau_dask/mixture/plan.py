"""Which arithmetic scores the rows under one Θ, and in blocks of how many.

Three ways lead to the same numbers. *Features* (`mixture.features`) turn a whole block into two matrix
products. They lose digits on components that are nearly singular, or many of their standard deviations from
the origin of the features, and they need much arithmetic in many dimensions. The *joint* form
(`mixture.features`) whitens rows by all components at once, and loses half as many digits. The *centred*
form (`mixture.estep`) works per component on the differences to its mean and requires nothing of the
data. `KernelPlan` says which component is scored in which way: a fixed function of Θ, never of a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np

from emtau_dask.mixture import features
from emtau_dask.mixture.covariance import CovarianceStructure, Frame
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.cutoff import Reach, may_leave_out, reach_where_few
from emtau_dask.mixture.features import (
    FeatureProducts,
    about_mean,
    coefficients,
    conditions,
    frames_of,
    statistics_of_moments,
    upper_bounds,
)
from emtau_dask.mixture.linalg import EPS, FEW_FEATURES, Bools, Floats, read_only, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import (
    RowSums,
    SufficientStatistics,
    merge,
    spread_out,
    tile_rows,
    views_of,
)

STRETCH_BYTES, MAX_STRETCH_ROWS = 2**23, 2**16
DOUBLE = np.dtype(np.float64)
SINGLE_EPS = float(np.finfo(np.float32).eps)
LIMIT = 1e-12
"""Largest error that products may bring into a log-density, in nats; about ε times `conditions`."""
SINGLE_LIMIT = 1e-5
"""The same for products in float32, of rows that are stored so."""
STATISTICS_SLACK = 4.0
"""Largest tolerated error of a component's new variances, relative to them, in units of the limits above."""
MOST_SHIFTED = 16.0
"""Largest tolerated rounding error of the joint form's scatters, relative to the centred form's."""
WIDEST, WIDEST_ALONE, WIDTH_PER_COMPONENT = 96, 10, 2
"""Most features d for which components with factors of their own use quadratic features: 10 + 2 K, but 96 at
most (`benchmarks/kernels.py`). All components share the cost of forming them."""
MOST_ALONE = 1 / 3
"""Largest share of the components that go centred beside features; where it is larger, all may go jointly."""
BLOCK_BYTES, LONG_BLOCK_BYTES, LONGEST_BLOCK_BYTES = 2**23, 2**24, 2**25
"""Of a block and its buffers. The second is for fewer than `FEW_FEATURES`, of which calls of NumPy are short,
the last where some components go centred beside features, in many more calls."""
WIDEST_IN_TILES = 19
"""The same for compiled tiles, which in the centred form are faster beyond (`benchmarks/compiled.py`)."""
SPARE_DIGITS = 4.0
"""Compiled tiles score a component by features only as long as rounding may grow so many times before it
reaches the limit: in the centred form they cost little more, and a pass that lost digits is done again."""
GROUP_BYTES, LEAST_GROUP_ROWS, MOST_GROUP_ROWS = 2**22, 8, 64
"""Of the rows that compiled tiles gather for components in the centred form."""
SIDE_PADDING, WIDEST_PADDING = 7, 23
"""Most numbers beyond a row's features in the scatters of tiles, and in the rows that are gathered."""
MIN_BLOCK_ROWS, MIN_CENTRED_ROWS, MAX_BLOCK_ROWS = 64, 1024, 2**15
"""In the centred form, K matrices (d, d) are read for each block, which should be long beside that."""
MERGED_ROWS = 8192
"""Rows whose moments about means compiled tiles merge block by block; their sums are merged pairwise."""
NEAR_BYTES, MOST_NEAR_ROWS = 2**24, 2**17
"""Of the rows of a block whose rows are scored near components: the longer, the more rows each has."""
NEAR_TILE_BYTES = 800
"""What tiles of such rows take for each component, beside its coefficients."""
MOST_SHRUNK = 2.0**-20
"""The least that may be left of a component's weight after a pass without those that do not count."""


def stretch_rows(structure: CovarianceStructure, n_components: int, n_features: int, block_rows: int) -> int:
    """Return how many rows `CentredStatistics` gathers: a fixed function of its arguments.

    They take about as much memory as their statistics, or 8 MiB where these take less. They are at most
    65,536, but not fewer than a block has.
    """
    statistics = 8 * math.prod(structure.shape(n_components, n_features))
    rows = max(STRETCH_BYTES, statistics) // (8 * (n_features + n_components))
    return max(block_rows, min(MAX_STRETCH_ROWS, rows))


class Form(Enum):
    """A way to score rows."""

    FEATURES = auto()
    JOINT = auto()
    CENTRED = auto()


def form_of(covariance_type: str, n_components: int, n_features: int) -> Form:
    """Return how well-conditioned components of this shape are scored: a fixed function of its arguments."""
    widest = min(WIDEST, WIDEST_ALONE + WIDTH_PER_COMPONENT * n_components)
    structure = structure_named(covariance_type)
    if n_features <= widest or not structure.own_factors:
        return Form.FEATURES
    return Form.JOINT if structure.solving_for(n_features) is None else Form.CENTRED


def row_bytes(covariance_type: str, n_components: int, n_features: int, form: Form) -> int:
    """Return the bytes that a row of a block takes in a kernel's buffers and temporary arrays."""
    buffers = 3 * n_features
    if form is Form.FEATURES:
        buffers += structure_named(covariance_type).n_row_features(n_features)
    elif form is Form.JOINT:
        buffers = 2 * n_features + features.buffer_rows(n_components, n_features)
    elif structure_named(covariance_type).solving_for(n_features) is not None:
        buffers += 2 * n_features
    return 8 * (buffers + n_features + 4 * n_components)


def block_rows(
    covariance_type: str, n_components: int, n_features: int, form: Form, *, mixed: bool = False
) -> int:
    """Return how many rows make a block: a fixed function of its arguments.

    A block with its buffers takes about 8 to 32 MiB and has at most 32,768 rows. A smaller one would gain in
    the L2 cache, but lose more: the longer the calls of NumPy, the less threads wait for each other between
    them. ``mixed`` is whether some components go centred beside others that are scored by features.
    """
    least = MIN_CENTRED_ROWS if form is Form.CENTRED else MIN_BLOCK_ROWS
    wanted = LONG_BLOCK_BYTES if n_features < FEW_FEATURES else BLOCK_BYTES
    if mixed:
        wanted = LONGEST_BLOCK_BYTES
    rows = wanted // row_bytes(covariance_type, n_components, n_features, form)
    return max(least, min(MAX_BLOCK_ROWS, rows // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS))


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
    forms = {form_of(*shape), Form.CENTRED, Form.JOINT if structure.own_factors else Form.CENTRED}
    mixed = not structure.shared
    wanted = {form: block_rows(*shape, form, mixed=mixed and form is Form.FEATURES) for form in forms}
    in_blocks = max(longest_block(n_rows, rows) * row_bytes(*shape, form) for form, rows in wanted.items())
    longest = longest_block(n_rows, block_rows(*shape, Form.CENTRED))
    stretch = stretch_rows(structure, n_components, n_features, longest)
    gathered = min(n_rows, stretch) * 8 * (n_components + 2 * n_features)
    in_tiles = 0
    if structure.own_factors and structure.solving_for(n_features) is None:
        in_tiles = _gathered_bytes(n_components, n_features, n_rows)
        in_tiles += _near_bytes(n_components, n_features, n_rows)
    return in_blocks + gathered + in_tiles + min(n_rows, tile_rows(n_features)) * 8 * n_features


class Products(Protocol):
    """Scores some components together, by products of all of them, in a buffer of scores (K', n_rows)."""

    def score(self, rows: Floats) -> None:
        """Write log-densities of rows (n, d), less the ceiling, into the first n columns of the scores."""
        ...

    def collect(self) -> None:
        """Add the statistics of the block scored last, whose responsibilities are in the scores now."""
        ...

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks collected, None where there were none; then begin again."""
        ...


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """How the rows are scored under one Θ.

    Attributes
    ----------
    parameters : MixtureParameters
    form : Form
        Of the components that are scored together.
    frame : Frame
        Where their coordinates are formed.
    together : ndarray of bool, shape (K,)
        The components that are scored together; the others go centred, one by one.
    single : bool
        Whether products are in float32, and all components are scored together by features.
    reach : Reach or None
        By which compiled tiles leave out components that do not count for a row; None where they score all.
        All that they score go centred then.
    """

    parameters: MixtureParameters
    form: Form
    frame: Frame
    together: Bools
    single: bool = False
    reach: Reach | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of rows, features and responsibilities."""
        return np.dtype(np.float32 if self.single else np.float64)

    @property
    def block_rows(self) -> int:
        """About how many rows a block has; twice as many in float32, of half as many bytes each."""
        parameters = self.parameters
        shape = parameters.covariance_type, parameters.n_components, parameters.n_features
        form = self.form if self.together.any() else Form.CENTRED
        rows = block_rows(*shape, form, mixed=self.bounds_others)
        return min(MAX_BLOCK_ROWS, 2 * rows) if self.single else rows

    @cached_property
    def ceiling(self) -> float:
        """Upper bound of the weighted log-density of any row, nats; it is subtracted from scores."""
        return float(self.parameters.log_scales.max())

    @cached_property
    def log_scales(self) -> Floats:
        """Those of the parameters, less the ceiling, shape (K, 1), nats."""
        return self.parameters.log_scales[:, np.newaxis] - self.ceiling

    @cached_property
    def _of_all(self) -> Floats:
        """The coefficients of the F features in the scores of all components, (K, F)."""
        found = coefficients(self.parameters, self.frame)
        found[:, 0] -= self.ceiling
        return found

    @property
    def coefficients(self) -> Floats:
        """Those of the K' components that are scored together, in the dtype of the products, (K', F)."""
        return self._of_all[self.together].astype(self.dtype, copy=False)

    @cached_property
    def factors(self) -> features.JointFactors:
        """The components that are scored together in the joint form."""
        centre, some = self.frame.centre, self.together
        return features.JointFactors(
            read_only_copy(centre),
            read_only(self.parameters.means[some] - centre),
            self.log_scales[some],
            read_only(self.parameters.precisions_cholesky[some]),
        )

    @cached_property
    def produced(self) -> Bools:
        """The components for which products write scores: those scored together, or all, shape (K,).

        Where at least half are scored together by features, a product for all costs less than a copy of
        theirs. It writes upper bounds for the others.
        """
        all_are = self.form is Form.FEATURES and 2 * np.count_nonzero(self.together) >= len(self.together)
        return np.ones_like(self.together) if all_are else self.together

    @property
    def bounds_others(self) -> bool:
        """Whether products write upper bounds of the scores of components that are not scored together."""
        return not self.together.all() and bool(self.produced.all())

    @cached_property
    def _written(self) -> Floats:
        """The coefficients of what products by features write, (K', F)."""
        if not self.bounds_others:
            return self.coefficients
        bounds = upper_bounds(self._of_all, self.parameters, self.frame)
        bounds[self.together] = self._of_all[self.together]
        return bounds

    def products(self, scores: Floats) -> Products | None:
        """Return what writes ``scores`` (K', n_rows) of the K' components in `produced`."""
        if not self.together.any():
            return None
        if self.form is Form.JOINT:
            return features.JointProducts(self.factors, scores)
        return FeatureProducts(self.parameters.structure, self._written, self.frame, scores)

    def statistics(self, sums: RowSums) -> SufficientStatistics:
        """Return the statistics of rows that were summed under this plan."""
        if sums.moments is None:
            assert sums.statistics is not None
            return sums.statistics
        structure, n_features = self.parameters.structure, self.parameters.n_features
        count = structure.n_row_features(n_features)
        shapes = structure.moment_shapes(int(np.count_nonzero(self.together)), count)
        some = statistics_of_moments(structure, self.frame, views_of(sums.moments, shapes))
        found = spread_out(some, self.together)
        return found if sums.statistics is None else merge(structure, found, sums.statistics)

    @property
    def exact(self) -> bool:
        """Whether every component is scored for every row, in the centred form."""
        return self.reach is None and not self.together.any()

    @cached_property
    def centred(self) -> KernelPlan:
        """The plan that scores every component in the centred form."""
        return KernelPlan(self.parameters, Form.CENTRED, self.frame, np.zeros_like(self.together))

    def again(self, produced: MixtureParameters) -> KernelPlan | None:
        """Return how to score the rows again, None where the statistics behind ``produced`` kept digits.

        They may not where a component collapsed during the iteration: beside its distance from the frame's
        origin it is tiny, and products lose its digits. It goes centred then. Where it lost nearly all of its
        weight, rows for which it did not count may be most of what it has left.
        """
        if self.reach is not None:
            kept = produced.weights >= MOST_SHRUNK * self.parameters.weights
            return None if kept.all() else self.centred
        if not self.together.any():
            return None
        epsilon, limit = (SINGLE_EPS, SINGLE_LIMIT) if self.single else (EPS, LIMIT)
        most = STATISTICS_SLACK * limit / epsilon
        if self.form is Form.JOINT:
            means = self.parameters.means
            seen = features.joint_conditions(produced, self.frame.centre, means) <= most
            good = seen & (features.shifts(produced, means) <= MOST_SHIFTED)
        else:
            good = conditions(produced, self.frame) <= most
        left = self.together & good
        if np.array_equal(left, self.together):
            return None
        divisible = not (self.single or self.parameters.structure.shared)
        return replace(self, together=left) if divisible and left.any() else self.centred


def plan_kernel(parameters: MixtureParameters, dtype: np.dtype[Any] = DOUBLE) -> KernelPlan:
    """Return how to score rows of ``dtype`` under ``parameters``.

    Products are in float32 where rows are, and where the condition holds without whitening, which could lose
    digits itself. Where features lose too many digits of many components, these may still be scored in the
    joint form if they have factors of their own; few cost less in the centred form.
    """
    form = form_of(parameters.covariance_type, parameters.n_components, parameters.n_features)
    if form is Form.CENTRED:
        nothing = np.zeros(parameters.n_components, dtype=np.bool_)
        return KernelPlan(parameters, form, about_mean(parameters), nothing)
    frames = frames_of(parameters)
    first = next(frames)
    if form is Form.JOINT:
        return _joint_plan(parameters, first)
    single = _single_plan(parameters, first, dtype)
    if single is not None:
        return single
    by_features = _best(_plans_by_features(parameters, chain([first], frames), LIMIT))
    alone = np.count_nonzero(~by_features.together)
    if not parameters.structure.own_factors or alone <= MOST_ALONE * parameters.n_components:
        return by_features
    return _best([by_features, _joint_plan(parameters, first)])


def plan_tiles(
    parameters: MixtureParameters, dtype: np.dtype[Any] = DOUBLE, chunk_rows: float = 0
) -> KernelPlan:
    """Return how compiled tiles score rows of ``dtype`` under ``parameters``: as `plan_kernel`, mostly.

    Where components have factors of their own, those for which features may soon lose too many digits are
    scored in the centred form, which needs no more arithmetic; with many features all are. With
    many components or features, components that do not count for a row are left out if few reach far;
    ``chunk_rows`` is about how many rows of a chunk are scored.
    """
    K, d = parameters.means.shape
    if not parameters.structure.own_factors or parameters.structure.solving_for(d) is not None:
        return plan_kernel(parameters, dtype)
    frames = frames_of(parameters)
    first = next(frames)
    by_features = form_of(parameters.covariance_type, K, d) is Form.FEATURES
    single = _single_plan(parameters, first, dtype) if by_features else None
    if single is not None:
        return single
    centred = KernelPlan(parameters, Form.CENTRED, first, np.zeros(K, dtype=np.bool_))
    if may_leave_out(K, d, chunk_rows):
        reach = reach_where_few(parameters, first.centre)
        if reach is not None:
            return replace(centred, reach=reach)
    if by_features and d <= WIDEST_IN_TILES:
        found = _best(_plans_by_features(parameters, chain([first], frames), LIMIT / SPARE_DIGITS))
        return found if found.together.any() else found.centred
    return centred


def _single_plan(parameters: MixtureParameters, first: Frame, dtype: np.dtype[Any]) -> KernelPlan | None:
    """Return the plan for products in float32, None where these would lose too many digits."""
    if dtype != np.float32:
        return None
    unwhitened = conditions(parameters, Frame(parameters.weights @ parameters.means, None))
    if not (SINGLE_EPS * unwhitened <= SINGLE_LIMIT).all():
        return None
    everything = np.ones(parameters.n_components, dtype=np.bool_)
    # NumPy subtracts a number of float64 from rows of float32 at half the speed.
    rounded = replace(first, centre=read_only_copy(first.centre.astype(np.float32)))
    return KernelPlan(parameters, Form.FEATURES, rounded, everything, True)


def _plans_by_features(
    parameters: MixtureParameters, frames: Iterable[Frame], limit: float
) -> Iterator[KernelPlan]:
    """Yield a plan for each frame: components go by features up to an error of ``limit`` nats."""
    for frame in frames:
        good = EPS * conditions(parameters, frame) <= limit
        if parameters.structure.shared:
            good = np.full_like(good, good.all())
        yield KernelPlan(parameters, Form.FEATURES, frame, good)


def _best(plans: Iterable[KernelPlan]) -> KernelPlan:
    """Return the first plan that scores all components together, else the first that scores most."""
    found = []
    for plan in plans:
        if plan.together.all():
            return plan
        found.append(plan)
    return max(found, key=lambda plan: int(plan.together.sum()))


def _joint_plan(parameters: MixtureParameters, frame: Frame) -> KernelPlan:
    good = EPS * features.joint_conditions(parameters, frame.centre) <= LIMIT
    return KernelPlan(parameters, Form.JOINT, frame, good)
