"""Criteria of how well a mixture describes rows, from what one pass over them finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Score:
    """What a pass over all rows found of a mixture; sums in nats, criteria in scikit-learn's scale.

    Attributes
    ----------
    log_likelihood : float
        ``L = Σ_n ln p(x_n | Θ)``.
    entropy : float
        ``E = −Σ_nk w_nk ln w_nk`` of the responsibilities.
    held_out_sum : float
        The part of L of the rows that the sample does not hold.
    rows, held_out_rows : int
        N, and how many of them the sample does not hold.
    parameters : int
        p, the free parameters of the mixture.
    """

    log_likelihood: float
    entropy: float
    held_out_sum: float
    rows: int
    held_out_rows: int
    parameters: int

    @property
    def mean(self) -> float:
        """The log-likelihood, nats per row."""
        return self.log_likelihood / self.rows

    @property
    def held_out(self) -> float:
        """The log-likelihood of the rows that the sample does not hold, nats per row; NaN without any."""
        return self.held_out_sum / self.held_out_rows if self.held_out_rows else math.nan

    @property
    def bic(self) -> float:
        """``−2 L + p ln N``: Schwarz 1978, "Estimating the dimension of a model"; lower is better."""
        return -2.0 * self.log_likelihood + self.parameters * math.log(self.rows)

    @property
    def aic(self) -> float:
        """``−2 L + 2 p``: Akaike 1974; lower is better."""
        return -2.0 * self.log_likelihood + 2.0 * self.parameters

    @property
    def icl(self) -> float:
        """``BIC + 2 E``; lower is better.

        Biernacki, Celeux and Govaert 2000, "Assessing a mixture model for clustering with the integrated
        completed likelihood", with the expected labels in place of the most probable ones (McLachlan and
        Peel 2000, "Finite mixture models", section 6.10.3).
        """
        return self.bic + 2.0 * self.entropy


@dataclass(frozen=True)
class Criterion:
    """What chooses among candidates.

    Attributes
    ----------
    name : str
    value : callable (Score) -> float
        Lower is better.
    of_sample : bool
        Whether it judges the fits to the sample themselves, so that no fit to all rows can be compared by it.
    """

    name: str
    value: Callable[[Score], float]
    of_sample: bool = False


CRITERIA: Mapping[str, Criterion] = MappingProxyType(
    {
        "bic": Criterion("bic", lambda score: score.bic),
        "aic": Criterion("aic", lambda score: score.aic),
        "icl": Criterion("icl", lambda score: score.icl),
        "held-out": Criterion("held-out", lambda score: -score.held_out, of_sample=True),
    }
)


def expected_loss(parameters: int, sample_rows: int, rows: int) -> float:
    """Return by how much a fit to a sample is expected to lie below a fit to all rows, nats per row.

    ``p (1/n − 1/N) / 2``: the errors of a fit to n of N rows have the covariance ``I⁻¹ (1/n − 1/N)`` about
    the optimum of all rows, where the log-likelihood has the curvature −I, I the Fisher information of a row.
    It holds for regular models; superfluous components make a mixture no regular one.
    """
    return 0.5 * parameters * (1.0 / sample_rows - 1.0 / rows)
