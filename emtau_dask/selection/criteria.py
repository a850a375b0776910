"""The settings of a selection, its criteria, and the choice of candidates to refit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from types import MappingProxyType
from typing import Any

from sklearn.base import clone

from emtau_dask.constraints import Constraint, integer
from emtau_dask.errors import ConfigError, short
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import settings_of
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import free_parameters
from emtau_dask.settings import CONSTRAINTS, OF_ONE_FIT

MAX_CANDIDATES = 10_000
MIN_SAMPLE_ROWS = 2**17
ROWS_PER_PARAMETER = 10
"""Minimum rows of the sample for each free parameter of the largest candidate; with fewer, chance decides
which optimum a fit finds."""
MAX_SAMPLE_VALUES = 2**25
"""Maximum values of the sample, 256 MiB of float64."""
MIN_HELD_OUT_SHARE = 0.2
"""Minimum share of the rows outside the sample, so that rows can be held out."""


@dataclass(frozen=True)
class Score:
    """Sums over all rows for a mixture, in nats; criteria in scikit-learn's scale.

    Attributes
    ----------
    log_likelihood : float
        ``L = Σ_n ln p(x_n | Θ)``.
    entropy : float
        ``E = −Σ_nk w_nk ln w_nk`` of the responsibilities.
    held_out_sum : float
        The part of L of the rows outside the sample.
    rows, held_out_rows : int
        N, and how many of these are outside the sample.
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
        """The log-likelihood of the rows outside the sample, nats per row; NaN without any."""
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
    """A rule that chooses among candidates.

    Attributes
    ----------
    name : str
    value : callable (Score) -> float
        Lower is better.
    of_sample : bool
        Whether it judges the fits to the sample; fits to all rows cannot be compared by it.
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
    """Return by how much a fit to a sample is expected to be below a fit to all rows, nats per row.

    ``p (1/n − 1/N) / 2``: the errors of a fit to n of N rows have the covariance ``I⁻¹ (1/n − 1/N)`` about
    the optimum of all rows, where the log-likelihood has the curvature −I, I the Fisher information of a row.
    It holds for regular models; a mixture with superfluous components is not regular.
    """
    return 0.5 * parameters * (1.0 / sample_rows - 1.0 / rows)


@dataclass(frozen=True)
class Standing:
    """A candidate that was fitted to all rows.

    Attributes
    ----------
    value : float
        The criterion, by the log-likelihood of the fit to all rows.
    loss : float
        By how many nats (of all rows) the fit to the sample is below it.
    """

    value: float
    loss: float


def standing(criterion: Criterion, score: Score, mean: float) -> Standing:
    """Return the standing of a candidate whose fit to all rows has ``mean`` nats per row."""
    loss = max(0.0, score.rows * mean - score.log_likelihood)
    return Standing(criterion.value(score) - 2.0 * loss, loss)


def leader(criterion: Criterion, scores: Mapping[str, Score], excluded: Collection[str]) -> str | None:
    """Return the best candidate by its fit to the sample, the first of equals; None without any."""
    left = [name for name in scores if name not in excluded]
    return min(left, key=lambda name: criterion.value(scores[name])) if left else None


def challenger(
    criterion: Criterion,
    scores: Mapping[str, Score],
    fitted: Mapping[str, Standing],
    excluded: Collection[str],
) -> str | None:
    """Return the candidate that is most likely to overtake all that are fitted to all rows; None without any.

    The first fit to all rows shows its loss by the sample, L nats. For another candidate the expected loss is
    ``L + (p' − p) (N/n − 1) / 2``: errors in the parameters that both have are the same.
    """
    if criterion.of_sample or not fitted:
        return None
    first, best = next(iter(fitted)), min(standing.value for standing in fitted.values())

    def expected(name: str) -> float:
        score, p = scores[name], scores[first].parameters
        more = expected_loss(score.parameters - p, score.rows - score.held_out_rows, score.rows)
        return criterion.value(score) - 2.0 * max(0.0, fitted[first].loss + score.rows * more)

    left = [name for name in scores if name not in fitted and name not in excluded and expected(name) < best]
    return min(left, key=expected) if left else None


@dataclass(frozen=True)
class Candidate:
    """A number of components K and a covariance type."""

    n_components: int
    covariance_type: str

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.covariance_type}-{self.n_components}"

    def n_parameters(self, n_features: int) -> int:
        """Return p, the free parameters for a number of features."""
        return free_parameters(structure_named(self.covariance_type), self.n_components, n_features)

    def __str__(self) -> str:
        return f"K = {self.n_components} ({self.covariance_type})"


@dataclass(frozen=True, eq=False)
class SelectionSettings:
    """The settings of a selection.

    Attributes
    ----------
    candidates : tuple of Candidate
        By covariance type in the given order, and ascending in K within each.
    criterion : Criterion
    template : GaussianMixture
        Has the settings of all fits except K and the covariance type; its ``random_state`` is that of the
        selection.
    sample_rows : int or None
        Requested number; None for the default.
    finalists : int
        Maximum candidates that are fitted to all rows.
    """

    candidates: tuple[Candidate, ...]
    criterion: Criterion
    template: GaussianMixture
    sample_rows: int | None
    finalists: int

    @property
    def largest(self) -> Candidate:
        """The candidate of the most components."""
        return max(self.candidates, key=lambda candidate: candidate.n_components)

    def estimator(self, candidate: Candidate, random_state: Any) -> GaussianMixture:
        """Return the estimator of a candidate, not fitted."""
        estimator: GaussianMixture = clone(self.template)
        estimator.set_params(
            n_components=candidate.n_components,
            covariance_type=candidate.covariance_type,
            random_state=random_state,
        )
        return estimator


def checked_settings(
    n_components: Any,
    covariance_types: Any,
    criterion: Any,
    random_state: Any,
    estimator: Any,
    sample_rows: Any,
    finalists: Any,
) -> SelectionSettings:
    """Return the settings of a selection; raises `ConfigError` for the first impossible one."""
    if not isinstance(criterion, str) or criterion not in CRITERIA:
        raise ConfigError(
            f"criterion is {short(criterion)}; it must be one of {', '.join(map(repr, CRITERIA))}."
        )
    if sample_rows is not None and not integer(1).holds(sample_rows):
        raise ConfigError(f"sample_rows is {short(sample_rows)}; it must be {integer(1).words}, or None.")
    if not integer(1).holds(finalists):
        raise ConfigError(f"finalists is {short(finalists)}; it must be {integer(1).words}.")
    if isinstance(n_components, Integral):
        raise ConfigError(
            f"n_components is {short(n_components)}; it must be several numbers to choose from, such as "
            f"range(1, {max(2, min(int(n_components), 1000)) + 1})."
        )
    counts = _several(
        "n_components", n_components, CONSTRAINTS["n_components"], "numbers such as range(2, 21)"
    )
    given = [covariance_types] if isinstance(covariance_types, str) else covariance_types
    types = _several("covariance_types", given, CONSTRAINTS["covariance_type"], "names such as 'full'")
    if len(counts) * len(types) > MAX_CANDIDATES:
        raise ConfigError(
            f"n_components and covariance_types make {len(counts) * len(types):,} candidates; at most "
            f"{MAX_CANDIDATES:,} are compared. Give fewer, such as range(10, 200, 10)."
        )
    return SelectionSettings(
        tuple(Candidate(count, kind) for kind in types for count in sorted(map(int, counts))),
        CRITERIA[criterion],
        _template(estimator, random_state),
        None if sample_rows is None else int(sample_rows),
        int(finalists),
    )


def _several(name: str, values: Any, constraint: Constraint, wanted: str) -> list[Any]:
    """Return the values to choose from; a range may be endless, so not all of it is listed."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {short(values)}; it must be a list of {wanted}.")
    listed = list(islice(values, MAX_CANDIDATES + 1))
    if not listed:
        raise ConfigError(f"{name} is empty; give at least one of {wanted}.")
    if len(listed) > MAX_CANDIDATES:
        raise ConfigError(f"{name} has more than {MAX_CANDIDATES:,} values. Give fewer.")
    for number, value in enumerate(listed):
        if not constraint.holds(value):
            hint = constraint.hint(value)
            raise ConfigError(f"{name} has {short(value)}; each must be {constraint.words}{hint}.")
        if value in listed[:number]:
            raise ConfigError(f"{name} has {short(value)} twice; give each once.")
    return listed


def _template(estimator: Any, random_state: Any) -> GaussianMixture:
    if estimator is not None and not isinstance(estimator, GaussianMixture):
        kind = type(estimator)
        raise ConfigError(
            f"estimator is a {kind.__name__} of {kind.__module__.partition('.')[0]}; give a GaussianMixture "
            "of emtau_dask, or remove it."
        )
    template: GaussianMixture = GaussianMixture() if estimator is None else clone(estimator)
    for name in OF_ONE_FIT:
        if getattr(template, name) is not None:
            remedy = "give checkpoint to select_components" if name == "checkpoint" else "remove it"
            raise ConfigError(f"estimator has {name}, which cannot serve all candidates; {remedy}.")
    if template.warm_start:
        raise ConfigError("estimator has warm_start=True; a selection begins new fits. Set it to False.")
    if random_state is not None:
        template.random_state = random_state
    settings_of(template)
    return template


def sample_share(rows: int, features: int, parameters: int, requested: int | None) -> float:
    """Return the share of the rows that is drawn, each row on its own by the hash of its number.

    By default ``N / ln N`` rows: then the errors of fits to the sample, ``p N / 2n`` nats on all rows, cost
    no more than BIC's penalty, ``p ln N / 2``. At least 2¹⁷ rows and 10 for each parameter of the largest
    candidate; at most 256 MiB (but always 10 for each parameter), and four fifths of the rows.
    """
    least = ROWS_PER_PARAMETER * parameters
    wanted = (
        float(requested)
        if requested is not None
        else max(MIN_SAMPLE_ROWS, rows / math.log(max(rows, 3)), least)
    )
    if requested is None:
        wanted = min(wanted, max(MAX_SAMPLE_VALUES / features, least))
    return min(wanted / rows, 1.0 - MIN_HELD_OUT_SHARE)
