"""What a selection is asked for, checked before any data is touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from sklearn.base import clone

from emtau_dask.checks import integer
from emtau_dask.errors import ConfigError
from emtau_dask.estimator import GaussianMixture
from emtau_dask.fit import CONSTRAINTS, check_settings
from emtau_dask.messages import short
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.model import free_parameters
from emtau_dask.selection.criteria import CRITERIA, Criterion

MOST_CANDIDATES = 10_000
NOT_GIVEN = ("weights_init", "means_init", "precisions_init", "checkpoint")
"""Settings of an estimator that fit one number of components, or one fit."""


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
        """Return p, the free parameters on so many features."""
        return free_parameters(structure_named(self.covariance_type), self.n_components, n_features)

    def __str__(self) -> str:
        return f"{self.n_components} {self.covariance_type}"


@dataclass(frozen=True, eq=False)
class SelectionSettings:
    """What a selection is asked for.

    Attributes
    ----------
    candidates : tuple of Candidate
        By covariance type as they were given, and ascending in K within each.
    criterion : Criterion
    template : GaussianMixture
        Has the settings of all fits but K and the covariance type; its ``random_state`` is that of the
        selection.
    sample_rows : int or None
        How many are asked for; None for the default.
    finalists : int
        Candidates that are fitted to all rows, at most.
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
        made: GaussianMixture = clone(self.template)
        made.set_params(
            n_components=candidate.n_components,
            covariance_type=candidate.covariance_type,
            random_state=random_state,
        )
        return made


def checked_settings(
    n_components: Any,
    covariance_types: Any,
    criterion: Any,
    random_state: Any,
    estimator: Any,
    sample_rows: Any,
    finalists: Any,
) -> SelectionSettings:
    """Return the settings of a selection; raises `ConfigError` for the first that is impossible."""
    if not isinstance(criterion, str) or criterion not in CRITERIA:
        raise ConfigError(
            f"criterion is {short(criterion)}; it must be one of {', '.join(map(repr, CRITERIA))}."
        )
    if sample_rows is not None and not integer(1).holds(sample_rows):
        raise ConfigError(f"sample_rows is {short(sample_rows)}; it must be {integer(1).words}, or None.")
    if not integer(1).holds(finalists):
        raise ConfigError(f"finalists is {short(finalists)}; it must be {integer(1).words}.")
    counts, types = _counts(n_components), _types(covariance_types)
    if len(counts) * len(types) > MOST_CANDIDATES:
        raise ConfigError(
            f"n_components and covariance_types make {len(counts) * len(types):,} candidates; at most "
            f"{MOST_CANDIDATES:,} are compared. Give fewer, such as range(10, 200, 10)."
        )
    return SelectionSettings(
        tuple(Candidate(count, kind) for kind in types for count in counts),
        CRITERIA[criterion],
        _template(estimator, random_state),
        None if sample_rows is None else int(sample_rows),
        int(finalists),
    )


def _counts(values: Any) -> list[int]:
    if isinstance(values, Integral):
        raise ConfigError(
            f"n_components is {short(values)}; it must be several numbers to choose from, such as "
            f"range(1, {max(2, min(int(values), 1000)) + 1})."
        )
    found = _listed(values, "n_components", "numbers such as range(2, 21)")
    for value in found:
        if not CONSTRAINTS["n_components"].holds(value):
            raise ConfigError(
                f"n_components has {short(value)}; each must be {CONSTRAINTS['n_components'].words}."
            )
    return sorted(_different([int(value) for value in found], "n_components"))


def _types(values: Any) -> list[str]:
    found = (
        [values] if isinstance(values, str) else _listed(values, "covariance_types", "names such as 'full'")
    )
    for value in found:
        if not CONSTRAINTS["covariance_type"].holds(value):
            raise ConfigError(
                f"covariance_types has {short(value)}; each must be {CONSTRAINTS['covariance_type'].words}."
            )
    return _different(list(found), "covariance_types")


def _listed(values: Any, name: str, wanted: str) -> list[Any]:
    """Return what is to be listed; at most one more than may be compared, since a range may be endless."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {short(values)}; it must be a list of {wanted}.")
    found = []
    for value in values:
        found.append(value)
        if len(found) > MOST_CANDIDATES:
            raise ConfigError(f"{name} has more than {MOST_CANDIDATES:,} values. Give fewer.")
    if not found:
        raise ConfigError(f"{name} is empty; give at least one of {wanted}.")
    return found


def _different(values: list[Any], name: str) -> list[Any]:
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if twice is not None:
        raise ConfigError(f"{name} has {short(twice)} twice; give each once.")
    return values


def _template(estimator: Any, random_state: Any) -> GaussianMixture:
    if estimator is not None and not isinstance(estimator, GaussianMixture):
        kind = type(estimator)
        raise ConfigError(
            f"estimator is a {kind.__name__} of {kind.__module__.partition('.')[0]}; give a GaussianMixture "
            "of emtau_dask, or leave it out."
        )
    template: GaussianMixture = GaussianMixture() if estimator is None else clone(estimator)
    for name in NOT_GIVEN:
        if getattr(template, name) is not None:
            remedy = "give checkpoint to select_components" if name == "checkpoint" else "leave it out"
            raise ConfigError(f"estimator has {name}, which cannot serve all candidates; {remedy}.")
    if template.warm_start:
        raise ConfigError("estimator has warm_start=True; a selection begins anew. Set it to False.")
    if random_state is not None:
        template.random_state = random_state
    check_settings(template.get_params(deep=False))
    return template
