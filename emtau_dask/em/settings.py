"""How a run of EM proceeds, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from emtau_dask.policies import ActivityPolicy, WeightedPolicy
from emtau_dask.rows import Samples

TEMPERATURES = (0.8, 0.6, 0.4, 0.2, 0.1)
"""Inverse temperatures of deterministic annealing (Ueda and Nakano 1998), from the last to the first."""
PASSES_EACH = 2
"""Annealed passes at each temperature."""
RUNS_EACH = 2
"""Runs from the same start where some are annealed: one that is, and one that is not."""


@dataclass(frozen=True)
class Climbing:
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

    memory: int
    samples: Samples
    annealed: bool = False

    def heat(self, run: int) -> int:
        """Return how many annealed passes a run begins with, by its number."""
        anneals = self.annealed and len(self.samples.shares) > 0 and run % RUNS_EACH == 0
        return len(TEMPERATURES) * PASSES_EACH if anneals else 0

    @staticmethod
    def inverse_temperature(heat: int) -> float:
        """Return the power of the densities by which rows are given to components in the next pass.

        Parameters
        ----------
        heat : int
            Annealed passes to come, that one included.
        """
        return TEMPERATURES[-(-heat // PASSES_EACH) - 1] if heat else 1.0


@dataclass(frozen=True)
class EmSettings:
    """How EM proceeds, and when it ends.

    Attributes
    ----------
    policy : ActivityPolicy
    tol : float
        Nats per row; 0 never stops by it.
    max_iter : int
    reg_covar : float
    gap_tol : float
        The fit also stops after a full pass whose estimated gap is below this; nats per row.
    climbing : Climbing or None
        None for steps of EM alone, on all rows.
    """

    policy: ActivityPolicy
    tol: float
    max_iter: int
    reg_covar: float
    gap_tol: float = 0.0
    climbing: Climbing | None = None

    @cached_property
    def weighted(self) -> bool:
        """Whether active rows stand for others; asked once, since a protocol is slow to check."""
        return isinstance(self.policy, WeightedPolicy)

    @property
    def most_on_samples(self) -> int:
        """Iterations, those of starts included, after which all rows are scored: half of ``max_iter``."""
        return self.max_iter // 2
