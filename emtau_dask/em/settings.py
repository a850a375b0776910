"""The settings of a fit after "auto" is resolved for the shape of its data, and its tolerances.

The limits by which "auto" decides were measured by `benchmarks/passes.py`; `docs/passes.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from emtau_dask.constraints import integer, number
from emtau_dask.data.row_random import Samples
from emtau_dask.em.sampling import has_few_rows
from emtau_dask.em.starts import GivenParameters
from emtau_dask.errors import ConfigError
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import free_parameters
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.policy import ActivityPolicy, WeightedPolicy
from emtau_dask.policies.registry import as_policy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.settings import Settings, marginalises

TEMPERATURES = (0.8, 0.6, 0.4, 0.2, 0.1)
"""Inverse temperatures of deterministic annealing (Ueda and Nakano 1998), from the last to the first."""
PASSES_PER_TEMPERATURE = 2
"""Annealed passes at each temperature."""
RUNS_PER_START = 2
"""Runs from the same start if runs are annealed: one with annealing and one without."""
MIN_ROWS_PER_PARAMETER, MIN_SAMPLE_ROWS = 10, 4096
"""Minimum rows of a sample: for each free parameter, and in all. Smaller samples ended in other optima."""
SAMPLE_GROWTH = 4
"""Each sample has four times the rows of the one before."""
MAX_SAMPLE_SHARE = 1 / 16
"""Maximum share of the rows in a sample after which sampled partial passes follow."""
MANY_STARTS, FEWER_STARTS, MAX_SHARE_FOR_MANY = 16, 8, 1 / 64
"""Starts that are compared on the first sample: 16 if it has at most 1/64 of the rows, else 8."""
ALL_ROWS = (1.0,)
"""The shares of fits that compare their starts on all rows, in memory."""
MAX_PRODUCTS_OF_STARTS = 2**26
"""Maximum products of features and coefficients in a pass over all rows for which starts are compared there.
They take about ten milliseconds."""
FEWEST_STARTS, MAX_COMPONENTS_FOR_FEWEST = 4, 8
"""Starts that are compared on a quarter of the rows or on all, and the maximum components for which they are
so few: the more components, the more k-means starts are bad. With more components there are 8."""
ANNEALED_STARTS = 3
"""Starts that are compared on a quarter of the rows if runs are annealed; each has two runs."""
MIN_ROWS_WITHOUT_ANNEALING = 10
"""Minimum rows of that quarter for each parameter for which no run is annealed."""
DEFAULT_TOL = 1e-5
"""Default tolerance for the change of the bound (nats per row)."""
MIN_ROWS_FOR_STATISTICAL = 10
"""Minimum rows for each parameter for which ``tol="statistical"`` is possible."""


@dataclass(frozen=True)
class Acceleration:
    """How a run extrapolates, and on which samples it begins.

    Attributes
    ----------
    memory : int
        Number of steps that are kept; with 0 every step is an EM step.
    samples : Samples
        A run begins on the smallest of them; without any, on all rows.
    annealed : bool
        Whether every other run begins with annealed passes over the smallest sample. Annealing merges
        components that are well separated, so the other runs begin from the same starts without it.
    """

    memory: Annotated[int, integer(0, 64)]
    samples: Samples
    annealed: bool = False

    def annealed_passes(self, run: int) -> int:
        """Return the number of annealed passes with which a run begins."""
        anneals = self.annealed and len(self.samples.shares) > 0 and run % RUNS_PER_START == 0
        return len(TEMPERATURES) * PASSES_PER_TEMPERATURE if anneals else 0

    @staticmethod
    def inverse_temperature(annealed_passes: int) -> float:
        """Return the power of the densities in the responsibilities of the next pass.

        Parameters
        ----------
        annealed_passes : int
            Annealed passes that are left, the next one included.
        """
        return TEMPERATURES[-(-annealed_passes // PASSES_PER_TEMPERATURE) - 1] if annealed_passes else 1.0


@dataclass(frozen=True, eq=False)
class EmSettings:
    """The settings of a fit: those that the user requested, and their values for the data.

    Attributes
    ----------
    requested : Settings
        Stored with a commit.
    policy : ActivityPolicy
    tol : float
        Nats per row; 0 means that the change of the bound never ends the fit.
    gap_tol : float
        The fit also stops after a full pass whose estimated gap is below this; nats per row.
    acceleration : Acceleration or None
        None for plain EM on all rows.
    seeds : tuple of int
        One for each run.
    previous_bound : float or None
        The bound with which that of the first iteration is compared, for a warm start.
    given : GivenParameters
        Starting parameters from the user, which replace those of the start.
    compiled : bool
        Whether the compiled loops are used where they can be; each process that fits decides.
    """

    requested: Settings
    policy: ActivityPolicy
    tol: Annotated[float, number(0)]
    gap_tol: Annotated[float, number(0)] = 0.0
    acceleration: Acceleration | None = None
    seeds: tuple[int, ...] = (0,)
    previous_bound: float | None = None
    given: GivenParameters = field(default_factory=GivenParameters)
    compiled: bool = False

    @property
    def max_iter(self) -> int:
        """Maximum number of iterations."""
        return self.requested.max_iter

    @property
    def reg_covar(self) -> float:
        """Added to every variance."""
        return self.requested.reg_covar

    @property
    def structure(self) -> CovarianceStructure:
        """The covariance type."""
        return structure_named(self.requested.covariance_type)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the rows in the samples that a run begins on."""
        return () if self.acceleration is None else self.acceleration.samples.shares

    @cached_property
    def has_sampling_weights(self) -> bool:
        """Whether active rows have sampling weights; cached, since protocols are slow to check."""
        return isinstance(self.policy, WeightedPolicy)


def max_sample_iterations(max_iter: int) -> int:
    """Return the maximum number of iterations on samples, those of all starts included."""
    return max_iter // 2


def policy_before_data(requested: Settings) -> ActivityPolicy:
    """Return the requested policy; for "auto" the one with the most row state of those it can become."""
    return EMSampled() if requested.automatic else as_policy(requested.algorithm)


def check_missing(requested: Settings, *, responsibilities: bool) -> None:
    """Raise `ConfigError` if ``missing="marginalise"`` conflicts with given responsibilities."""
    if marginalises(requested.missing) and responsibilities:
        raise ConfigError(
            "responsibilities_init is given with missing='marginalise', but it needs complete rows. "
            "Give weights_init, means_init and precisions_init, or set missing='drop', which leaves "
            "incomplete rows out."
        )


@dataclass(frozen=True)
class Automatic:
    """What ``algorithm="auto"`` becomes for data of a shape.

    Attributes
    ----------
    policy : ActivityPolicy
    shares : tuple of float
        Shares of the rows in the samples with which a run begins; empty to begin with full passes.
    n_init : int
        Number of starts.
    annealed : bool
        Whether each start has two runs on the sample, one of them with annealed passes.
    """

    policy: ActivityPolicy
    shares: tuple[float, ...]
    n_init: int
    annealed: bool = False


def automatic(n_rows: int, n_components: int, n_features: int, covariance_type: str) -> Automatic:
    """Return how ``algorithm="auto"`` fits data of a shape.

    It begins on samples of 4⁻ʲ of the rows, at most 1/16, with at least 4,096 rows and 10 rows per parameter.
    Then it alternates passes over all rows with passes over a sixteenth of them (`EMSampled`). If a sixteenth
    has too few rows, it begins on a quarter of the rows, and all later passes are full. If that quarter has
    fewer than 10 rows per parameter, each start is run twice there, once with annealing. With fewer rows, or
    fewer than one per parameter, starts are compared on all rows if these are few and a pass takes
    milliseconds; else there is one start. One component needs one start.
    """
    structure = structure_named(covariance_type)
    p = free_parameters(structure, n_components, n_features)
    least = max(MIN_ROWS_PER_PARAMETER * p, MIN_SAMPLE_ROWS)
    if n_components == 1:
        return Automatic(FullEM(), (), 1)
    share = MAX_SAMPLE_SHARE
    shares: list[float] = []
    while share * n_rows >= least:
        shares.insert(0, share)
        share /= SAMPLE_GROWTH
    if shares:
        return Automatic(
            EMSampled(), tuple(shares), MANY_STARTS if shares[0] <= MAX_SHARE_FOR_MANY else FEWER_STARTS
        )
    starts = FEWEST_STARTS if n_components <= MAX_COMPONENTS_FOR_FEWEST else FEWER_STARTS
    if n_rows >= MIN_SAMPLE_ROWS and n_rows / 4 >= MIN_ROWS_WITHOUT_ANNEALING * p:
        return Automatic(FullEM(), (0.25,), starts)
    if n_rows >= MIN_SAMPLE_ROWS and n_rows / 4 >= p:
        return Automatic(FullEM(), (0.25,), ANNEALED_STARTS, annealed=True)
    products = n_rows * n_components * structure.n_row_features(n_features)
    if has_few_rows(n_rows, n_components, n_features) and products <= MAX_PRODUCTS_OF_STARTS:
        return Automatic(FullEM(), ALL_ROWS, starts)
    return Automatic(FullEM(), (), 1)


def statistical_gap(n_rows: int, p: int) -> float:
    """Return the gap (nats per row) below which a fit is as good as its data: ``min(0.01 p/2N, 1/8N)``.

    p/2N is what sampling error itself costs. The gap of EM lies in its slowest direction: with 1/8N the
    parameters are within half a standard error there.
    """
    return min(0.01 * p / 2, 1 / 8) / n_rows


def tolerances(tol: float | str, n_rows: int, p: int, *, auto: bool) -> tuple[float, float]:
    """Return the two tolerances of a fit, for the change of the bound and for the gap; 0 switches one off.

    Parameters
    ----------
    tol : float, "auto" or "statistical"
    n_rows, p : int
        Rows of positive weight, and free parameters.
    auto : bool
        Whether the algorithm is ``"auto"``. Then ``tol="auto"`` is ``"statistical"`` for enough rows.

    Raises
    ------
    ConfigError
        ``"statistical"`` on too few rows.
    """
    if isinstance(tol, str):
        enough = n_rows >= MIN_ROWS_FOR_STATISTICAL * p
        if tol == "statistical" and not enough:
            raise ConfigError(
                f"tol='statistical' needs {MIN_ROWS_FOR_STATISTICAL} rows for each of the {p:,} free "
                f"parameters; there are {n_rows:,} rows. Give a number, a change of the "
                f"log-likelihood per row, such as {DEFAULT_TOL:g}, or fewer components."
            )
        if tol == "statistical" or (auto and enough):
            return 0.0, statistical_gap(n_rows, p)
        return DEFAULT_TOL, 0.0
    return float(tol), 0.0
