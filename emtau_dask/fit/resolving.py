"""What ``algorithm="auto"``, ``n_init="auto"`` and ``tol`` in words stand for: fixed functions of shapes.

The bounds were measured by `benchmarks/passes.py`; `docs/passes.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from emtau_dask.errors import ConfigError
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.model import free_parameters
from emtau_dask.policies import ActivityPolicy, EMSampled, FullEM

ROWS_PER_PARAMETER = 10
"""Fewest rows of a sample for each free parameter; with fewer, samples ended in other optima."""
LEAST_SAMPLE = 4096
FINER = 4
"""Each sample has four times the rows of the one before."""
LARGEST_SHARE = 1 / 16
STARTS, FEWER_STARTS, MOST_STARTING_WORK = 16, 8, 1 / 64
"""Starts that are compared on the first sample; fewer where that is a larger share of the rows than this."""
ANNEALED_STARTS = 3
"""Of those that are annealed on a quarter of the rows, each of which also has a run that is not."""
ROWS_UNANNEALED = 10
"""Rows of that quarter for each parameter from which on no run is annealed."""
NAMED_TOL = 1e-5
LEAST_ROWS = 10
"""Rows for each parameter from which on sampling error says when a fit is good enough."""


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
            EMSampled(), tuple(shares), STARTS if shares[0] <= MOST_STARTING_WORK else FEWER_STARTS
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
