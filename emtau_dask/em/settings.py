"""What the settings of a fit come to for its data: what "auto" stands for, and when the fit ends.

The bounds by which "auto" decides were measured by `benchmarks/passes.py`; `docs/passes.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from emtau_dask.constraints import integer, number
from emtau_dask.data.row_random import Samples
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
PASSES_EACH = 2
"""Annealed passes at each temperature."""
RUNS_EACH = 2
"""Runs from the same start where some are annealed: one that is, and one that is not."""
ROWS_PER_PARAMETER = 10
"""Fewest rows of a sample for each free parameter; with fewer, samples ended in other optima."""
LEAST_SAMPLE = 4096
FINER = 4
"""Each sample has four times the rows of the one before."""
LARGEST_SHARE = 1 / 16
MANY_STARTS, FEWER_STARTS, MOST_STARTING_WORK = 16, 8, 1 / 64
"""Starts that are compared on the first sample; fewer where that is a larger share of the rows than this."""
ANNEALED_STARTS = 3
"""Of those that are annealed on a quarter of the rows, each of which also has a run that is not."""
ROWS_UNANNEALED = 10
"""Rows of that quarter for each parameter from which on no run is annealed."""
NAMED_TOL = 1e-5
LEAST_ROWS = 10
"""Rows for each parameter from which on sampling error says when a fit is good enough."""


@dataclass(frozen=True)
class Acceleration:
    """How a run extrapolates, and on which samples it begins.

    Attributes
    ----------
    memory : int
        Steps that are remembered; with 0 every step is EM's own.
    samples : Samples
        Of which the run begins on the smallest; without shares it begins on all rows.
    annealed : bool
        Whether every other run begins with annealed passes over the smallest sample. Where components are
        well apart annealing merges them, so the runs between are not annealed, from the same starts.
    """

    memory: Annotated[int, integer(0, 64)]
    samples: Samples
    annealed: bool = False

    def annealed_passes(self, run: int) -> int:
        """Return how many annealed passes a run begins with, by its number."""
        anneals = self.annealed and len(self.samples.shares) > 0 and run % RUNS_EACH == 0
        return len(TEMPERATURES) * PASSES_EACH if anneals else 0

    @staticmethod
    def inverse_temperature(annealed_passes: int) -> float:
        """Return the power of the densities by which rows are given to components in the next pass.

        Parameters
        ----------
        annealed_passes : int
            Annealed passes to come, that one included.
        """
        return TEMPERATURES[-(-annealed_passes // PASSES_EACH) - 1] if annealed_passes else 1.0


@dataclass(frozen=True, eq=False)
class EmSettings:
    """What was asked for, and what it comes to for the data of a fit; commits store what a resume reads.

    Attributes
    ----------
    asked : Settings
    policy : ActivityPolicy
    tol : float
        Nats per row; 0 never stops by it.
    gap_tol : float
        The fit also stops after a full pass whose estimated gap is below this; nats per row.
    acceleration : Acceleration or None
        None for steps of EM alone, on all rows.
    seeds : tuple of int
        One for each run.
    previous_bound : float or None
        What the first iteration's bound is compared with, for a warm start.
    given : GivenParameters
        Starting parameters that replace those of the start. Commits have them among their arrays.
    compiled : bool
        Whether the compiled loops are used where they can be; decided anew in each process that fits.
    """

    asked: Settings
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
        """M-steps, at most."""
        return self.asked.max_iter

    @property
    def reg_covar(self) -> float:
        """Added to every variance."""
        return self.asked.reg_covar

    @property
    def structure(self) -> CovarianceStructure:
        """What the covariance type is."""
        return structure_named(self.asked.covariance_type)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the rows in the samples that a run begins on."""
        return () if self.acceleration is None else self.acceleration.samples.shares

    @cached_property
    def weighted(self) -> bool:
        """Whether active rows stand for others; asked once, since a protocol is slow to check."""
        return isinstance(self.policy, WeightedPolicy)


def most_on_samples(max_iter: int) -> int:
    """Return after how many iterations all rows are scored, those of starts included: half of the most."""
    return max_iter // 2


def policy_before_data(asked: Settings) -> ActivityPolicy:
    """Return the policy that is asked for; where the data decide, the one of these that needs the most."""
    return EMSampled() if asked.automatic else as_policy(asked.algorithm)


def check_missing(asked: Settings, *, responsibilities: bool) -> None:
    """Raise `ConfigError` where a fit cannot integrate over missing values as these settings ask for."""
    if not marginalises(asked.missing):
        return
    found = None
    if not isinstance(policy_before_data(asked), FullEM):
        found = "another algorithm"
    elif asked.acceleration == "quasi-newton":
        found = "acceleration='quasi-newton'"
    elif responsibilities:
        found = "responsibilities_init"
    if found is not None:
        raise ConfigError(
            f"missing='marginalise' needs algorithm='em' without acceleration and responsibilities_init, but "
            f"{found} is asked for. Set algorithm='em', or fit complete rows and set missing='marginalise' "
            "afterwards, for predictions, or missing='drop', which leaves incomplete rows out."
        )


@dataclass(frozen=True)
class Automatic:
    """How a fit proceeds.

    Attributes
    ----------
    policy : ActivityPolicy
    shares : tuple of float
        Shares of the rows in the samples that it begins on; none for all rows at once.
    n_init : int
        Starts.
    annealed : bool
        Whether each start has two runs on the sample, of which one begins with annealed passes.
    """

    policy: ActivityPolicy
    shares: tuple[float, ...]
    n_init: int
    annealed: bool = False


def automatic(n_rows: int, n_components: int, n_features: int, covariance_type: str) -> Automatic:
    """Return how ``algorithm="auto"`` fits data of a shape.

    It begins on samples of 4⁻ʲ of the rows (1/16 at most) that have at least 10 rows for each parameter, and
    4,096; then it alternates passes over all rows with passes over a sixteenth of them (`EMSampled`). Where a
    sixteenth has too few rows, all passes are over all rows, after a sample of a quarter of them. Where that
    has fewer than 10 rows for each parameter, runs that are annealed on it are compared with others; where it
    has fewer than one, there is none. With one component there is nothing to iterate.
    """
    p = free_parameters(structure_named(covariance_type), n_components, n_features)
    least = max(ROWS_PER_PARAMETER * p, LEAST_SAMPLE)
    if n_components == 1:
        return Automatic(FullEM(), (), 1)
    share = LARGEST_SHARE
    shares: list[float] = []
    while share * n_rows >= least:
        shares.insert(0, share)
        share /= FINER
    if shares:
        return Automatic(
            EMSampled(), tuple(shares), MANY_STARTS if shares[0] <= MOST_STARTING_WORK else FEWER_STARTS
        )
    if n_rows >= LEAST_SAMPLE and n_rows / 4 >= ROWS_UNANNEALED * p:
        return Automatic(FullEM(), (0.25,), FEWER_STARTS)
    if n_rows >= LEAST_SAMPLE and n_rows / 4 >= p:
        return Automatic(FullEM(), (0.25,), ANNEALED_STARTS, annealed=True)
    return Automatic(FullEM(), (), 1)


def statistical_gap(n_rows: int, p: int) -> float:
    """Return the gap (nats per row) below which a fit is as good as its data: ``min(0.01 p/2N, 1/8N)``.

    p/2N is what sampling error itself costs. The gap of EM lies in its slowest direction: with 1/8N the
    parameters are within half a standard error there.
    """
    return min(0.01 * p / 2, 1 / 8) / n_rows


def tolerances(tol: float | str, n_rows: int, p: int, *, auto: bool) -> tuple[float, float]:
    """Return the change of the bound and the gap below which a fit ends; 0 for one that does not end it.

    Parameters
    ----------
    tol : float, "auto" or "statistical"
    n_rows, p : int
        Rows of positive weight, and free parameters.
    auto : bool
        Whether the algorithm is ``"auto"``, for which ``"auto"`` is ``"statistical"`` where the data suffice.

    Raises
    ------
    ConfigError
        ``"statistical"`` on too few rows.
    """
    if isinstance(tol, str):
        enough = n_rows >= LEAST_ROWS * p
        if tol == "statistical" and not enough:
            raise ConfigError(
                f"tol='statistical' needs {LEAST_ROWS} rows for each of the {p:,} free parameters; there are "
                f"{n_rows:,} rows. Give a number of nats per row, such as {NAMED_TOL:g}, or fewer components."
            )
        if tol == "statistical" or (auto and enough):
            return 0.0, statistical_gap(n_rows, p)
        return NAMED_TOL, 0.0
    return float(tol), 0.0
